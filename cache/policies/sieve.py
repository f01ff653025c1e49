"""SIEVE."""

from cache.policies.queues import QueuePolicy

_END = -1  # both ends of the list; block ids are not negative


class Sieve(QueuePolicy):
    """SIEVE (Zhang et al., NSDI 2024): one FIFO queue and a hand.

    A hit marks a block.  The hand moves from the oldest block to the newest and starts again.  It
    skips marked blocks and clears their marks.  The first unmarked block is evicted.  Skipped
    blocks keep their places.  Blocks in use are skipped and keep their marks.
    """

    name = "sieve"

    def _reset(self) -> None:
        # A linked list, because the hand can be in the middle of it.
        self._newer: dict[int, int] = {_END: _END}
        self._older: dict[int, int] = {_END: _END}
        self._visited: dict[int, bool] = {}
        self._hand = _END

    def _admit(self, block: int) -> None:
        newest = self._older[_END]
        self._newer[newest] = self._older[_END] = block
        self._older[block], self._newer[block] = newest, _END
        self._visited[block] = False

    def _settle(self, block: int) -> None:
        self._remove(block)
        self._admit(block)

    def _hit(self, block: int) -> None:
        self._visited[block] = True

    def _choose(self) -> int:
        while True:
            if self._hand == _END:
                self._hand = self._newer[_END]
            block = self._hand
            if not self._in_use(block):
                if not self._visited[block]:
                    return block
                self._visited[block] = False
            self._hand = self._newer[block]

    def _remove(self, block: int) -> None:
        older, newer = self._older[block], self._newer[block]
        self._newer[older], self._older[newer] = newer, older
        if self._hand == block:
            self._hand = newer
