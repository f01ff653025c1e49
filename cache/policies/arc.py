"""Adaptive replacement cache."""

from collections.abc import Hashable

from cache.policies.queues import GhostList, Queue, QueuePolicy


class ARC(QueuePolicy):
    """ARC (Megiddo and Modha, FAST 2003).

    T1 holds blocks used once, T2 blocks used again; both are in LRU order.  B1 and B2 hold the keys
    of blocks evicted from T1 and T2.  A miss on a key in B1 raises ``p``, the target length of T1;
    a miss on a key in B2 lowers ``p``.
    """

    name = "arc"

    def _reset(self) -> None:
        self._t1 = Queue()
        self._t2 = Queue()
        self._b1 = GhostList(self._capacity)
        self._b2 = GhostList(2 * self._capacity)
        self._p = 0.0
        self._missed_in = 0  # 1: B1, 2: B2, 0: neither

    def miss(self, key: Hashable) -> None:
        len_b1, len_b2 = self._length(self._b1), self._length(self._b2)
        self._missed_in = 0
        if self._recall(self._b1, key):
            self._missed_in = 1
            self._p = min(self._p + max(len_b2 / len_b1, 1), self._capacity)
        elif self._recall(self._b2, key):
            self._missed_in = 2
            self._p = max(self._p - max(len_b1 / len_b2, 1), 0)

    def _admit(self, block: int) -> None:
        self._move(block, self._t2 if self._recalled(block) else self._t1)

    def _hit(self, block: int) -> None:
        self._move(block, self._t2)

    def _choose(self) -> int:
        if not self._missed_in:
            len_t1, len_b1 = self._length(self._t1), self._length(self._b1)
            if len_t1 + len_b1 >= self._capacity:
                if not len_b1:
                    return self._first_of((self._t1, self._t2))  # T1 fills the cache: no ghost
                self._forget_oldest(self._b1)
            elif (
                len_t1 + self._length(self._t2) + len_b1 + self._length(self._b2)
                >= 2 * self._capacity
            ):
                self._forget_oldest(self._b2)
        t1_over = self._length(self._t1) - self._p
        if t1_over > 0 or (self._missed_in == 2 and t1_over == 0):
            block = self._first_of((self._t1, self._t2))
        else:
            block = self._first_of((self._t2, self._t1))
        self._remember(self._b1 if self._is_in(block, self._t1) else self._b2, block)
        return block
