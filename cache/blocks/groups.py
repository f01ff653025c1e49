"""Groups of layers that keep K/V of the same tokens.

A model may mix layers with full attention, with a sliding window and with a state (Mamba, linear
attention).  As in vLLM, all groups share one pool: a block holds K/V of ``block_size`` tokens in
the layers of one group, or a state of these layers.  Every sequence has a block table per group.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cache.checks import at_least, shown

KINDS = "full", "window", "state"


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one kind.

    Raises ValueError for an unknown kind, for a window below 1 and for a window of another kind.
    """

    kind: str = "full"
    """"full": attention to all tokens; "window": to the last ``window`` tokens; "state": the layers
    read only the state after the previous token."""
    window: int | None = None
    """Number of tokens that a query sees, itself included; None unless the kind is "window"."""
    layers: int | tuple[int, ...] = 1
    """Number of layers, or their indices in the model.  The managers and the replay do not use it:
    the blocks of all groups have the same number of bytes."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={shown(self.kind)}: needs one of {', '.join(KINDS)}")
        if (self.window is None) == (self.kind == "window"):
            raise ValueError(
                f"window={shown(self.window)}: a group of kind {self.kind!r} needs "
                f"{'the number of tokens that a query sees' if self.window is None else 'None'}"
            )
        if self.window is not None:
            at_least(1, "window", self.window)
        indices = self.layers if isinstance(self.layers, tuple) else (self.layers,)
        if not all(isinstance(index, int) and index >= 0 for index in indices):
            raise ValueError(f"layers={shown(self.layers)}: needs a number, or a tuple of indices")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.layers if isinstance(self.layers, int) else len(self.layers)

    @property
    def _reach(self) -> int:
        """Number of tokens before a query that it reads; 1 for a state."""
        return 1 if self.window is None else self.window - 1

    def num_unseen(self, start: int, block_size: int) -> int:
        """Number of leading blocks that neither the query at position ``start`` nor a later query
        reads."""
        return 0 if self.kind == "full" else max(0, start - self._reach) // block_size

    def num_blocks_of_hit(self, block_size: int) -> int:
        """Number of blocks before a position that a hit up to the position needs; at least 1.

        Only the groups of kind "window" and "state" have this limit.
        """
        return max(1, -(-self._reach // block_size))

    def num_blocks_at_once(self, chunk: int, block_size: int) -> int:
        """Maximum number of blocks of a sequence in a window or state group, if it gets slots
        for up to ``chunk`` tokens in one call."""
        if self.window is None:
            return 2
        return -(-(self._reach + chunk) // block_size) + 1

    def longest_hit(self, limit: int, block_size: int, is_cached: Callable[[int], bool]) -> int:
        """Length in blocks, at most ``limit``, of the longest prefix that these layers can resume.

        ``is_cached(i)``: whether block ``i`` of the sequence is cached.  Searches from the end.
        """
        if self.kind == "full":
            return next((i for i in range(limit) if not is_cached(i)), limit)
        needed, run = self.num_blocks_of_hit(block_size), 0
        for position in reversed(range(limit)):
            run = run + 1 if is_cached(position) else 0
            if run == needed:
                return position + run
        return run if self.kind == "window" else 0

    def kept(
        self,
        first: int,
        last: int,
        *,
        block_size: int,
        retention: int | None,
        boundaries: Iterable[int],
    ) -> Sequence[int]:
        """Positions of the full blocks from ``first`` to ``last - 1`` that are cached.

        A full group keeps all.  Without ``retention`` so do the others.  With ``retention`` they
        keep the blocks that a hit up to one of ``boundaries`` (lengths in blocks) needs and, if it
        is above 0, up to each multiple of ``retention`` tokens.  The rule is that of
        ``prefix_cache_retention_interval`` in vLLM 0.33.
        """
        if self.kind == "full" or retention is None:
            return range(first, last)
        needed = self.num_blocks_of_hit(block_size)
        every = retention // block_size
        if every and needed >= every:
            return range(first, last)
        tails = [range(max(first, end - needed), min(last, end)) for end in boundaries]
        if every:
            ends = range((first // every + 1) * every, last + needed, every)
            tails += [range(max(first, end - needed), min(last, end)) for end in ends]
        return sorted({position for tail in tails for position in tail})


def check_groups(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return ``groups`` as a tuple.

    Raises ValueError unless they are Groups and one of them has the kind "full".
    """
    checked = tuple(groups) if isinstance(groups, Iterable) else (groups,)
    if not all(isinstance(group, Group) for group in checked):
        raise ValueError(f"groups={shown(groups)}: needs a list of Group(kind, window, layers)")
    if "full" not in [group.kind for group in checked]:
        raise ValueError(f"groups={shown(groups)}: needs a group of kind 'full'")
    return checked


def check_retention(retention: int | None, groups: Iterable[Group], block_size: int) -> int | None:
    """Return ``retention``, in tokens.

    Raises ValueError, as vLLM does, unless it is None, 0, or a multiple of ``block_size`` with a
    group of kind "window" or "state".
    """
    if retention is None:
        return None
    retention = at_least(0, "retention", retention)
    if retention % block_size:
        raise ValueError(f"retention={retention}: needs a multiple of block_size={block_size}")
    if retention and all(group.kind == "full" for group in groups):
        raise ValueError(f"retention={retention}: no group has the kind 'window' or 'state'")
    return retention


def layer_groups(windows: Sequence[int | str | None]) -> tuple[Group, ...]:
    """Divide a model's layers into groups of about equal size, as vLLM does.

    ``windows`` has an entry per layer: its window in tokens, None for full attention, or "state".
    The size of a group is the number of layers of the scarcest kind, or of the most frequent kind
    if that is below 1.5 times as many.  Layers of a kind are dealt out in turn, so a group may have
    fewer layers; a block has room for the largest group.  Full groups come first.

    Raises ValueError for an entry of another kind, and without layers.

    Example: 62 layers of Gemma 3 27B (10 full, 52 with a window) give 1 + 6 groups of up to 10.
    """
    of_kind: dict[int | str | None, list[int]] = {}
    window: Any
    for layer, window in enumerate(windows):
        if window not in (None, "state"):
            window = at_least(1, f"windows[{layer}]", window)
        of_kind.setdefault(window, []).append(layer)
    if not of_kind:
        raise ValueError("windows is empty: needs an entry for each layer")
    counts = [len(layers) for layers in of_kind.values()]
    size = min(counts)
    if max(counts) < 1.5 * size:
        size = max(counts)
    groups = []
    for window, layers in sorted(of_kind.items(), key=lambda item: item[0] is not None):
        kind = "full" if window is None else "state" if window == "state" else "window"
        tokens = window if isinstance(window, int) else None
        num_groups = -(-len(layers) // size)
        for first in range(num_groups):
            groups.append(Group(kind, tokens, tuple(layers[first::num_groups])))
    return tuple(groups)
