"""wgmma in flight."""

from __future__ import annotations


class MatrixQueue:
    """Placeholder of step 3."""

    def __init__(self, batch):
        self._batch = batch
