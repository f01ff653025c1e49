"""cp.async: asynchronous copies of each thread, in groups (PTX ISA 9.7.9.25.3).

commit_group closes a group with all copies that the thread issued since its last commit_group.
wait_group n waits until at most the n youngest groups of the thread are pending. The data arrives
at the wait. Until then an access to its destination in shared memory is a fault, so the moment of
arrival makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class _Copies:
    """Copies issued by one instruction."""

    addresses: np.ndarray
    data: np.ndarray
    source: tuple[np.ndarray, np.ndarray, np.ndarray]  # addresses, threads that read, sizes
    pending: np.ndarray  # threads whose copy has not arrived
    group: np.ndarray  # for each thread: number of groups it had committed before


class CopyQueue:
    """Copies in flight, for all threads of a batch."""

    def __init__(self, batch):
        self._batch = batch
        self._committed = np.zeros(batch.num_threads, np.int64)
        self._queue: list[_Copies] = []
        self._in_flight = np.zeros(batch.num_programs, np.int64)
        self.most_in_flight = np.zeros(batch.num_programs, np.int64)
        """Largest number of pending bytes, for each program."""

    def issue(self, addresses: np.ndarray, mask: np.ndarray, data: np.ndarray, source) -> None:
        """Start copying data[thread] to the address of each masked thread. source: (addresses,
        threads that read, sizes), as given to `GlobalMemory.load`."""
        self._batch.shared.store(self._batch, addresses, mask, data, later=True)
        self._queue.append(_Copies(addresses, data, source, mask.copy(), self._committed.copy()))
        self._in_flight += self._num_bytes(data, mask)
        np.maximum(self.most_in_flight, self._in_flight, out=self.most_in_flight)

    def commit(self, mask: np.ndarray) -> None:
        """commit_group: close the current group of each masked thread."""
        self._committed += mask

    def wait(self, mask: np.ndarray, most_pending: int) -> None:
        """wait_group: complete all but the `most_pending` youngest groups of the masked threads."""
        still = []
        for copies in self._queue:
            arriving = copies.pending & mask & (copies.group < self._committed - most_pending)
            if arriving.any():
                batch, (origin, reading, sizes) = self._batch, copies.source
                batch.shared.land_copies(batch, copies.addresses, arriving, copies.data)
                size = copies.data.shape[1]
                batch.memory.end_copies(batch, origin, arriving & reading, sizes, size)
                copies.pending = copies.pending & ~arriving
                self._in_flight -= self._num_bytes(copies.data, arriving)
            if copies.pending.any():
                still.append(copies)
        self._queue = still

    def _num_bytes(self, data: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Bytes copied by the masked threads, for each program."""
        return data.shape[1] * mask.reshape(self._batch.num_programs, -1).sum(1)

    def wait_all(self, mask: np.ndarray) -> None:
        """wait_all: complete every copy of the masked threads, committed or not."""
        self.commit(mask)
        self.wait(mask, 0)
