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

FullBlock = tuple[int, Items[bytes], int]
"""A device block of a sequence, the keys of the sequence's blocks, and the block's position."""


class HostTier:
    """Blocks in host memory that hold copies of full device blocks.

    The tiers of vLLM (``kv_offload``), SGLang (HiCache) and LMCache, between one device and host
    memory.  The manager calls it; the caller moves the data, see ``CacheManager.take_transfers``.

    A host block is in use while a sequence that holds its content has blocks, and while it is
    loaded.  All other host blocks are the policy's.  So the policy sees an access when a sequence
    is freed; sequences that hold a block at the same time are one access.  If all host blocks are
    in use, a block is not stored.

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
        self._on_device: dict[int, tuple[bytes, bytes | None, int]] = {}  # of device blocks
        self._num_on_device: Counter[bytes] = Counter()
        self._out: dict[int, int] = {}  # host block -> device block, copied in this step
        self._next_out: dict[int, int] = {}  # copied in the next step
        self._in: dict[int, int] = {}  # device block -> host block, copied in this step

    def find(self, key: bytes) -> int | None:
        """The host block with the content ``key`` that can be loaded in this step, or None."""
        host = self.pool.find(key)
        return None if host in self._next_out else host

    def lookup(self, hashes: Items[bytes]) -> list[int]:
        """Host blocks of the longest prefix of ``hashes`` that can be loaded in this step."""
        hosts = self.pool.lookup(hashes)
        late = (i for i, host in enumerate(hosts) if host in self._next_out)
        return hosts[: next(late, None)] if self._next_out else hosts

    def load(self, host_block: int, device_block: int) -> None:
        """Load ``host_block`` in this step.  It is in use until then."""
        if device_block not in self._in:
            self.pool.share([host_block])
            self._in[device_block] = host_block
            self._counts["loaded_blocks"] += 1

    def use(self, blocks: Items[FullBlock], is_stored: bool) -> list[int]:
        """A sequence uses ``blocks``.  Returns the host blocks that it uses from now on.

        ``is_stored``: whether their K/V are stored before this step.
        """
        found: list[int] = []
        if self.store != "back":  # what is stored must evict no later block of the sequence
            hosts = [self.pool.find(hashes[position]) for _, hashes, position in blocks]
            found = [host for host in hosts if host is not None]
            self.pool.share(found)
        used = [self._use(block, is_stored) for block in blocks]
        self.pool.free(found)
        return [host for host in used if host is not None]

    def _use(self, full: FullBlock, is_stored: bool) -> int | None:
        block, hashes, position = full
        key, parent = hashes[position], hashes[position - 1] if position else None
        if self.store == "back" and block not in self._on_device:
            self._on_device[block] = key, parent, position
            self._num_on_device[key] += 1
        host = self.pool.find(key)
        if host is not None:
            if self.inclusive:
                self.pool.share([host])
            return host if self.inclusive else None
        if self.store == "back" or not self._is_due(key):
            return None
        return self._store(block, key, parent, position, self._out if is_stored else self._next_out)

    def _is_due(self, key: bytes) -> bool:
        if self.store != "selective":
            return True
        uses = (self._uses.take(key) or 0) + 1
        self._uses.add(key, uses)
        return uses >= self.store_threshold

    def _store(
        self, block: int, key: bytes, parent: bytes | None, position: int, pairs: dict[int, int]
    ) -> int | None:
        if not self.pool.num_free_blocks:
            return None
        host = self.pool.insert(key, parent, position)
        for stale in (self._out, self._next_out):  # its former content
            stale.pop(host, None)
        pairs[host] = block
        return host

    def taken(self, block: int, key: bytes | None) -> None:
        """A sequence took the device ``block`` for the content ``key``.  None: not full yet."""
        if block not in self._on_device or self._on_device[block][0] == key:
            return
        lost, parent, position = self._on_device.pop(block)
        self._num_on_device[lost] -= 1
        if not self._num_on_device[lost]:
            del self._num_on_device[lost]
            if lost not in self.pool:
                self._store(block, lost, parent, position, self._out)

    def take_transfers(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """See ``CacheManager.take_transfers``."""
        out, self._out, self._next_out = self._out, self._next_out, {}
        loads, self._in = self._in, {}
        self._counts["stored_blocks"] += len(out)
        self._free_pairs(out, loads)
        if not self.inclusive:
            for host in {*loads.values()}:
                self.pool.discard(host)
        return [(block, host) for host, block in out.items()], [
            (host, block) for block, host in loads.items()
        ]

    def _free_pairs(self, out: dict[int, int], loads: dict[int, int]) -> None:
        if self.store == "back":  # no sequence uses them
            self.pool.free([*reversed(out)])  # so that the first evicted is the oldest here, too
        self.pool.free([*loads.values()])

    def reset(self) -> None:
        """Drop all content and all pairs.  No sequence has blocks."""
        self._free_pairs(self._out, self._in)
        self._clear()
        self.pool.reset_prefix_cache()

    def check_invariants(self, in_use: Iterable[int]) -> None:
        """Raise AssertionError unless all is consistent.  ``in_use``: blocks of the sequences."""
        self.pool.check_invariants()
        users = Counter(in_use)
        users.update([*self._in.values(), *(self._out if self.store == "back" else ())])
        for block, count in enumerate(self.pool.ref_counts):
            require(count == users[block], f"host block {block}: {count} users, not {users[block]}")
        kept = Counter(key for key, *_ in self._on_device.values())
        require(kept == self._num_on_device, f"device holds {kept}, not {self._num_on_device}")
