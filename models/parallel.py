"""Tensor parallelism: which part of every matrix a rank holds, and the collectives that join them.

The layout of Megatron-LM (Shoeybi et al., 2019): the matrices that widen (QKV, gate and up, the
embedding by vocabulary) are split by output, those that narrow (attention output, down) by input,
so that each half of a layer needs a single all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallel:
    """This process's place among the ``size`` ranks that compute one model together.

    ``group`` is a torch.distributed process group, None for the default one.  With size 1 the
    collectives do nothing and torch.distributed need not be initialised.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}, size={self.size}: needs 0 <= rank < size")

    def share(self, count: int, what: str) -> range:
        """The contiguous part of ``count`` items that this rank holds.

        ``count`` is divisible by size; or size by count, and then several ranks hold the same item
        (KV heads, of which a model may have fewer than there are GPUs).
        Raises ValueError, naming ``what`` is split, for anything else.
        """
        if count % self.size == 0:
            each = count // self.size
            return range(self.rank * each, (self.rank + 1) * each)
        if self.size % count == 0:
            item = self.rank // (self.size // count)
            return range(item, item + 1)
        raise ValueError(f"tensor_parallel_size={self.size} does not divide {what}={count}")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over all ranks, in place; returns it."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' ``x``, of equal shapes, along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
