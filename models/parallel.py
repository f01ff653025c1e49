"""Tensor parallelism: the part of every matrix that a rank holds, and the collectives.

The layout is Megatron-LM's (Shoeybi et al., 2019).  QKV, gate and up projections and the vocabulary
are split by output.  Attention output and down projections are split by input.  So attention and
MLP need one all-reduce each.
"""

import atexit
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallel:
    """This process's rank among the ``size`` ranks of a model.

    The ranks are torch.distributed's default group.  With size 1 the collectives do nothing, and
    torch.distributed need not be initialised.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}, size={self.size}: needs 0 <= rank < size")

    def share(self, count: int, name: str, *, repeat: bool = False) -> range:
        """This rank's contiguous part of ``count`` items.

        repeat: if there are fewer items than ranks, several ranks hold the same item.  Use it for
            KV heads, never for a dimension that an all-reduce sums over.

        Raises ValueError, naming ``name``, unless size divides count or, with ``repeat``, count
        divides size."""
        if count % self.size == 0:
            each = count // self.size
            return range(self.rank * each, (self.rank + 1) * each)
        if repeat and self.size % count == 0:
            item = self.rank // (self.size // count)
            return range(item, item + 1)
        raise ValueError(f"tensor_parallel_size={self.size} does not divide {name}={count}")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over all ranks in place; returns ``x``."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate ``x`` of all ranks along the last dimension.  Shapes must be equal."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def min(self, value: int, device: torch.device) -> int:
        """The smallest ``value`` of all ranks.  device: where the group's collectives run."""
        if self.size == 1:
            return value
        smallest = torch.tensor(value, device=device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest)


def is_distributed() -> bool:
    """Whether torch.distributed is initialised, or torchrun started this process."""
    return dist.is_initialized() or dist.is_torchelastic_launched()


def join_tensor_parallel(size: int, device: torch.device) -> TensorParallel:
    """Join the initialised group of ``size`` ranks, or initialise the ranks that torchrun started.

    All ranks run the same program on the same requests, so they make the same schedule.  Raises
    ValueError if there is no such group or its size differs."""
    if size == 1:
        return TensorParallel()
    if not dist.is_initialized():
        if not is_distributed():
            raise ValueError(
                f"tensor_parallel_size={size}: needs {size} processes; start them with "
                f"torchrun --nproc-per-node {size}, or use models.workers.start_workers"
            )
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave)  # otherwise gloo aborts the process at its end
    if dist.get_world_size() != size:
        raise ValueError(
            f"tensor_parallel_size={size}: torch.distributed has {dist.get_world_size()} ranks"
        )
    return TensorParallel(dist.get_rank(), size)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
