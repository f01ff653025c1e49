"""A tier of blocks in host memory behind the blocks of a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from cache.blocks.hashing import BlockHasher
from cache.blocks.pool import BlockPool
from cache.checks import at_least, require, shown, true_or_false
from cache.policies import as_policy
from cache.policies.base import EvictionPolicy
from cache.policies.queues import GhostList

STORE_RULES = ("through", "selective", "back")
_TRACKED = 64_000
"""Contents whose uses ``selective`` counts; the number that vLLM counts."""


class HostTier:
    """Blocks in host memory that hold copies of full device blocks.

    The tiers of vLLM (``kv_offload``), SGLang (HiCache) and LMCache, between one device and host
    memory.  The manager calls it; the caller moves the data, see ``CacheManager.take_transfers``.

    A host block is in use while a sequence that holds its content has blocks, and while a pair
    names it.  All other host blocks are the policy's.  So the policy sees one access per sequence,
    when the sequence is freed.  If all host blocks are in use, a block is not stored.

    Args:
        num_blocks: number of host blocks.
        policy: chooses which host block is given up.
        store: when a device block is stored.  "through": when it is full.  "selective": when its
            content is used for the ``store_threshold``-th time (computing it is a use; counts of
            the latest 64,000 contents are kept).  "back": when the device evicts it.
        inclusive: False: a load removes the content from host memory.  It needs "back", and a
            policy that defines ``remove``.
        hasher: gives the keys of blocks.

    Attributes:
        pool: the host blocks, their keys and the policy.

    Raises ValueError, naming the argument.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        policy: str | EvictionPolicy,
        store: str,
        store_threshold: int,
        inclusive: bool,
        hasher: BlockHasher,
        counts: dict[str, int],
    ) -> None:
        if store not in STORE_RULES:
            raise ValueError(f"store={shown(store)}: choose from {', '.join(STORE_RULES)}")
        self.store, self.hasher = store, hasher
        self.store_threshold = at_least(1, "store_threshold", store_threshold)
        self.inclusive = true_or_false("inclusive", inclusive)
        if not inclusive and store != "back":
            raise ValueError(f'inclusive=False: needs store="back", not store={store!r}')
        try:
            policy = as_policy(policy)
            self.pool = BlockPool(num_blocks, policy, {"allocated_blocks": 0, "evicted_blocks": 0})
        except ValueError as error:
            raise ValueError(f"host_policy: {error}") from None
        if not inclusive and "remove" not in policy.hooks:
            raise ValueError(f"inclusive=False: host_policy {policy.name!r} defines no remove")
        self._counts = counts  # of the manager
        self._clear()

    def _clear(self) -> None:
        self._uses = GhostList(_TRACKED)
        self._on_device: dict[int, tuple[Items[bytes], int]] = {}  # content of device blocks
        self._num_on_device: Counter[bytes] = Counter()
        self._out: list[tuple[int, int]] = []  # (device, host) pairs of this step
        self._next_out: list[tuple[int, int]] = []  # of the next step
        self._arriving: set[int] = set()  # host blocks of _next_out
        self._in: dict[int, int] = {}  # device block -> host block, of this step

    def lookup(self, hashes: Items[bytes]) -> list[int]:
        """Host blocks of the longest prefix of ``hashes`` that can be loaded in this step."""
        blocks = self.pool.lookup(hashes)
        if not self._arriving.isdisjoint(blocks):
            blocks = blocks[: next(i for i, b in enumerate(blocks) if b in self._arriving)]
        return blocks

    def has(self, key: bytes) -> bool:
        """Whether ``lookup`` would find a block for ``key``."""
        host = self.pool.find(key)
        return host is not None and host not in self._arriving

    def load(self, host_block: int, device_block: int) -> None:
        """Load ``host_block`` in this step.  It is in use until then."""
        if device_block not in self._in:
            self.pool.share([host_block])
            self._in[device_block] = host_block
            self._counts["loaded_blocks"] += 1

    def use(self, block: int, hashes: Items[bytes], position: int, is_stored: bool) -> int | None:
        """A sequence uses the device ``block`` for the content ``hashes[position]``.

        ``is_stored``: whether its K/V are stored before this step.  Returns the host block with
        this content, which the sequence then uses too, or None.
        """
        key = hashes[position]
        if self.store == "back" and block not in self._on_device:
            self._on_device[block] = hashes, position
            self._num_on_device[key] += 1
        host = self.pool.find(key)
        if host is not None:
            if not self.inclusive:
                return None
            self.pool.share([host])
            return host
        if self.store == "back" or not self._is_due(key):
            return None
        host = self._store(block, hashes, position, self._out if is_stored else self._next_out)
        if host is not None:
            self.pool.share([host])
            if not is_stored:
                self._arriving.add(host)
        return host

    def _is_due(self, key: bytes) -> bool:
        if self.store != "selective":
            return True
        uses = (self._uses.take(key) or 0) + 1
        self._uses.add(key, uses)
        return uses >= self.store_threshold

    def _store(
        self, block: int, hashes: Items[bytes], position: int, pairs: list[tuple[int, int]]
    ) -> int | None:
        if not self.pool.num_free_blocks:
            return None
        host = self.pool.insert(hashes, position)
        pairs.append((block, host))
        self._counts["stored_blocks"] += 1
        return host

    def taken(self, block: int, key: bytes | None) -> None:
        """A sequence took the device ``block`` for the content ``key``.  None: not full yet."""
        hashes, position = self._on_device.get(block, ((), 0))
        if not hashes or hashes[position] == key:
            return
        del self._on_device[block]
        lost = hashes[position]
        self._num_on_device[lost] -= 1
        if not self._num_on_device[lost]:
            del self._num_on_device[lost]
            if lost not in self.pool:
                self._store(block, hashes, position, self._out)

    def take_transfers(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """See ``CacheManager.take_transfers``."""
        out, self._out, self._next_out = self._out, self._next_out, []
        loads, self._in = self._in, {}
        self._arriving.clear()
        self.pool.free([host for _, host in reversed(out)])  # the first evicted stays the oldest
        self.pool.free([*loads.values()])
        if not self.inclusive:
            for host in {*loads.values()}:
                self.pool.discard(host)
        return out, [(host, device) for device, host in loads.items()]

    def reset(self) -> None:
        """Drop all content and all pairs.  No sequence has blocks."""
        for pairs in (self._out, self._next_out):
            self.pool.free([host for _, host in pairs])
        self.pool.free([*self._in.values()])
        self._clear()
        self.pool.reset_prefix_cache()

    def check_invariants(self, in_use: Iterable[int]) -> None:
        """Raise AssertionError unless all is consistent.  ``in_use``: blocks of the sequences."""
        self.pool.check_invariants()
        users = Counter(in_use)
        users.update(host for _, host in (*self._out, *self._next_out))
        users.update(self._in.values())
        for block, count in enumerate(self.pool.ref_counts):
            require(count == users[block], f"host block {block}: {count} users, not {users[block]}")
        kept = Counter(hashes[position] for hashes, position in self._on_device.values())
        require(kept == self._num_on_device, f"device holds {kept}, not {self._num_on_device}")
