"""Helpers of all manager tests: to use a manager briefly, and to compare all its state."""

import enum
import gc
import sys
from array import array
from collections import deque
from collections.abc import Callable

from cache import POLICIES, CacheManager, Sequence, make_manager
from cache.managers import MANAGERS

NAMES = sorted(MANAGERS)
CACHING = [name for name in NAMES if MANAGERS[name].prefix_caching]
ONLINE_POLICIES = sorted(name for name, policy in POLICIES.items() if not policy.needs_future)
OWN = [name for name in NAMES if ".py:" in name]
"""The manager that the option --manager names."""
FORKING = [name for name in NAMES if MANAGERS[name].can_fork]


def manager_of(name: str, num_blocks: int = 10, block_size: int = 4, **options) -> CacheManager:
    if name == "contiguous":
        options.setdefault("reservation", "pow2")
    return make_manager(name, num_blocks=num_blocks, block_size=block_size, **options)


def started(manager: CacheManager, seq_id, token_ids, **keys) -> Sequence:
    """A sequence that holds the blocks of all its tokens."""
    seq = Sequence(seq_id, token_ids, **keys)
    manager.allocate(seq)
    manager.check_invariants()
    return seq


def used(manager: CacheManager, seq_id, token_ids, **keys) -> None:
    """Allocate and free a sequence."""
    manager.free(started(manager, seq_id, token_ids, **keys))
    manager.check_invariants()


def grow(manager: CacheManager, seq: Sequence, *token_ids: int) -> list[tuple[int, int]]:
    """Decode ``token_ids``; returns all copies."""
    copies = []
    for token_id in token_ids:
        seq.append_token(token_id)
        copies += manager.append(seq)
        manager.check_invariants()
    return copies


def cached(manager: CacheManager, token_ids, **keys) -> int:
    """How many of ``token_ids`` are a cached prefix of a longer sequence."""
    return manager.get_computed_blocks(Sequence("probe", [*token_ids, 0], **keys))[1]


def lines_run(function: Callable[[], object]) -> int:
    """Number of Python lines that a call runs: its cost on a machine of any speed.

    The garbage collector is off: Hypothesis has it call Python code, at any time.
    """
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    previous = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(previous)
        gc.enable()
    return count


def state_of(value, known: dict[int, int] | None = None):
    """The whole state of ``value``, usually a manager, as plain values that can be compared.

    Objects are numbered in the order of the walk.  A sequence is represented by its counters, since
    its hashes are computed on demand.
    """
    known = {} if known is None else known
    if value is None or isinstance(value, int | float | str | bytes | enum.Enum):
        return value
    if isinstance(value, array | bytearray | range):
        return tuple(value)
    if id(value) in known:
        return "again", known[id(value)]
    known[id(value)] = len(known)
    if isinstance(value, list | tuple | deque):
        return [state_of(item, known) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, dict):
        return [(state_of(k, known), state_of(v, known)) for k, v in value.items()]
    if isinstance(value, Sequence):
        return value.seq_id, value.num_cached_tokens, value.num_computed_tokens
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    names += getattr(value, "__dict__", {})
    skipped = {"_hasher", "_log_hasher", "find", "_rng"}
    return [
        (name, state_of(getattr(value, name), known))
        for name in sorted(set(names) - skipped)
        if hasattr(value, name)
    ]
