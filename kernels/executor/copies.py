"""cp.async: asynchronous copies of each thread, in groups (PTX ISA 9.7.9.25.3).

A thread's copies since its last commit_group make up its next group; wait_group n waits until at
most its n youngest groups are pending. Data arrive at the wait. Shared memory refuses accesses
to their place until then, so it makes no difference when they arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class _Copies:
    """The copies that one instruction issued."""

    addresses: np.ndarray
    data: np.ndarray
    source: tuple[np.ndarray, np.ndarray, np.ndarray]  # addresses, threads that read, sizes
    pending: np.ndarray  # threads whose copy has not arrived
    group: np.ndarray  # of each thread: the number of groups that it had committed before


class CopyQueue:
    """Copies in flight of all threads of a batch."""

    def __init__(self, batch):
        self._batch = batch
        self._committed = np.zeros(batch.num_threads, np.int64)
        self._queue: list[_Copies] = []
        self._in_flight = np.zeros(batch.num_programs, np.int64)
        self.most_in_flight = np.zeros(batch.num_programs, np.int64)
        """Most bytes of each program that were pending at a time."""

    def issue(self, addresses: np.ndarray, mask: np.ndarray, data: np.ndarray, source) -> None:
        """The masked threads copy the bytes data[thread] to their addresses. source: addresses,
        threads that read and sizes, as `GlobalMemory.load` got them."""
        self._batch.shared.issue_copies(self._batch, addresses, mask, data.shape[1])
        self._queue.append(_Copies(addresses, data, source, mask.copy(), self._committed.copy()))
        self._in_flight += self._num_bytes(data, mask)
        np.maximum(self.most_in_flight, self._in_flight, out=self.most_in_flight)

    def commit(self, mask: np.ndarray) -> None:
        """Close the group of each masked thread."""
        self._committed += mask

    def wait(self, mask: np.ndarray, most_pending: int) -> None:
        """Let all but the `most_pending` youngest groups of the masked threads arrive."""
        still = []
        for copies in self._queue:
            arriving = copies.pending & mask & (copies.group < self._committed - most_pending)
            if arriving.any():
                self._batch.shared.land_copies(copies.addresses, arriving, copies.data)
                origin, reading, sizes = copies.source
                size = copies.data.shape[1]
                self._batch.launch.memory.end_copies(origin, arriving & reading, sizes, size)
                copies.pending = copies.pending & ~arriving
                self._in_flight -= self._num_bytes(copies.data, arriving)
            if copies.pending.any():
                still.append(copies)
        self._queue = still

    def _num_bytes(self, data: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Bytes that the masked threads of each program copy."""
        return data.shape[1] * mask.reshape(self._batch.num_programs, -1).sum(1)

    def wait_all(self, mask: np.ndarray) -> None:
        """Let everything that the masked threads issued arrive, committed or not."""
        self.commit(mask)
        self.wait(mask, 0)
