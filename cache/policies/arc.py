"""Adaptive replacement cache."""

from __future__ import annotations

from collections.abc import Hashable

from cache.policies.queues import GhostList, Queue, QueuePolicy


class ARC(QueuePolicy):
    """ARC (Megiddo and Modha, FAST 2003).

    T1 holds blocks seen once, T2 blocks seen again, both LRU; B1 and B2 remember the keys that
    they lost.  A miss that B1 remembers raises the target length ``p`` of T1, one that B2
    remembers lowers it.
    """

    name = "arc"

    def _reset(self) -> None:
        self._t1 = Queue()
        self._t2 = Queue()
        self._b1 = GhostList(self._capacity)
        self._b2 = GhostList(2 * self._capacity)
        self._p = 0.0
        self._missed_in: GhostList | None = None

    def miss(self, key: Hashable) -> None:
        len_b1, len_b2 = len(self._b1), len(self._b2)
        if self._b1.take(key) is not None:
            self._missed_in = self._b1
            self._p = min(self._p + max(len_b2 / len_b1, 1), self._capacity)
        elif self._b2.take(key) is not None:
            self._missed_in = self._b2
            self._p = max(self._p - max(len_b1 / len_b2, 1), 0)
        else:
            self._missed_in = None
            return
        self._returning[key] = 0

    def _admit(self, block: int) -> None:
        returns = self._keys[block] in self._returning
        self._move(block, self._t2 if returns else self._t1)

    def _hit(self, block: int) -> None:
        self._move(block, self._t2)

    def _choose(self) -> int:
        if self._missed_in is None:
            if len(self._t1) + len(self._b1) >= self._capacity:
                if not len(self._b1):
                    return self._first_of(self._t1, self._t2)  # T1 fills the cache: no ghost
                self._b1.forget_oldest()
            elif (
                len(self._t1) + len(self._t2) + len(self._b1) + len(self._b2) >= 2 * self._capacity
            ):
                self._b2.forget_oldest()
        t1_is_long = len(self._t1) > self._p or (
            self._missed_in is self._b2 and len(self._t1) == self._p
        )
        if t1_is_long:
            block = self._first_of(self._t1, self._t2)
        else:
            block = self._first_of(self._t2, self._t1)
        ghosts = self._b1 if self._queue_of[block] is self._t1 else self._b2
        ghosts.add(self._keys[block])
        return block
