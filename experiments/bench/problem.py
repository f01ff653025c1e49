"""What the GPU experiments time: ops at shapes, and cells of them; see ``kernel_problems.py``.

This file imports neither torch nor kernels, so that experiments are listed at once and
TRITON_INTERPRET can be set before; the other files on problems do, and are imported by cells.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from experiments.harness import Count, Options, Positive, Unavailable

if TYPE_CHECKING:
    import torch

    from kernels.testing.accuracy import Accuracy

Launch = Literal["graph", "eager"]
Ceiling = Literal["copy", "device_to_host", "host_to_device"]
OURS = "pagelab"
"""What our kernels are called among the implementations."""
FP8_SCALE = 1 / 64


class WrongResult(Exception):
    """A result beyond the bound; nothing is reported of its time."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a problem depends on."""

    op: str
    """A key of ``kernel_problems.OPS``."""
    batch: int
    """Sequences; for store, norm and gate, tokens; for copy and swap, blocks."""
    context_len: int = 0
    """Tokens of each sequence, its queries included."""
    query_len: int = 1
    """Queries of each sequence."""
    prefix_len: int = 0
    """Leading tokens that all sequences share, for cascade."""
    block_size: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_layers: int = 1
    """Layers that copy and swap move the blocks of."""
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    """Of the cache; ``dtype`` if None."""
    num_splits: int | None = None
    """Programs that share a sequence's tokens, in decode and prefill; the op's choice if None."""
    min_cache_elements: int = 0
    """Of K and of V (copy: of all planes): the cache is enlarged to so many, and those at its end
    are used."""
    seed: int = 0

    def columns(self) -> dict[str, Any]:
        """As columns of a table."""
        names = ("op", "batch", "context_len", "query_len", "prefix_len", "block_size")
        names += ("num_q_heads", "num_kv_heads", "head_dim", "num_layers", "dtype", "num_splits")
        columns = {name: getattr(self, name) for name in names}
        return {**columns, "kv_dtype": self.kv_dtype or self.dtype}


@dataclass(frozen=True, kw_only=True)
class OnHeads(Options):
    """Options of experiments that time ops: what all their shapes have in common."""

    num_q_heads: Count = 32
    num_kv_heads: Count = 8
    head_dim: Count = 128
    dtype: Literal["float16", "bfloat16", "float32"] = "bfloat16"
    kv_dtype: Literal["float8_e4m3fn"] | None = None
    """Of the cache; that of the queries if None."""
    budget_ms: Positive = 60.0
    """Device time for the samples of a cell."""

    def shape(self, op: str, **sizes: Any) -> Shape:
        """``op`` at these sizes."""
        names = ("num_q_heads", "num_kv_heads", "head_dim", "dtype", "kv_dtype", "seed")
        return Shape(op=op, **{name: getattr(self, name) for name in names}, **sizes)


@dataclass(frozen=True, kw_only=True)
class Timed(Options):
    """A cell: an implementation at a shape, checked and timed."""

    shape: Shape
    implementation: str
    launch: Launch
    budget_ms: float

    @property
    def group(self) -> tuple[str, ...]:
        return (self.shape.op,)


def timed_cells(
    options: Options,
    shape: Shape,
    implementations: Iterable[str],
    launches: Iterable[Launch] = ("graph",),
) -> Iterator[Timed]:
    """The cells of one shape, with the seed and budget_ms of ``options``."""
    given = {"seed": options.seed, "shape": shape, "budget_ms": options.budget_ms}
    for implementation, launch in itertools.product(implementations, launches):
        yield Timed(implementation=implementation, launch=launch, **given)


def run_timed(cell: Timed) -> list[dict[str, Any]]:
    """The row of a cell."""
    use_device()
    from experiments.bench import kernel_problems

    return [
        kernel_problems.run(
            cell.shape, cell.implementation, launch=cell.launch, budget_ms=cell.budget_ms
        )
    ]


@dataclass
class Problem:
    """An op at a shape."""

    num_bytes: int
    """The fewest that must be read and written; of swap, those that cross the link to the host."""
    flops: int
    implementations: dict[str, Callable[[], torch.Tensor]]
    """Each works on the same inputs."""
    check: Callable[[torch.Tensor], Accuracy]
    """How right the result of one is."""
    reset: Callable[[], object] | None = None
    """Undoes what an implementation wrote to its inputs."""
    eager_only: frozenset[str] = frozenset()
    """Implementations that no CUDA graph can capture."""
    ceiling: Ceiling = "copy"
    """The measured rate that the bytes per second are held against."""

    def judged(self, implementation: str) -> Accuracy:
        """How right the result of an implementation is.

        Raises Unavailable where its package does not have what it takes.
        """
        if self.reset:
            self.reset()
        try:
            return self.check(self.implementations[implementation]())
        except NotImplementedError as error:
            raise Unavailable(f"{implementation}: {error}") from error


def accuracy_columns(accuracy: Accuracy) -> dict[str, float]:
    """As columns of a table."""
    return {name: getattr(accuracy, name) for name in ("error", "eager_error", "bound")}


def use_device() -> torch.device:
    """The GPU, or a CPU with kernels in Triton's interpreter; before ``kernels`` is imported."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")


def dtypes(shape: Shape) -> tuple[torch.dtype, torch.dtype]:
    import torch

    return getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype or shape.dtype)


def generator_of(shape: Shape, device: torch.device) -> torch.Generator | None:
    """What the inputs of ``shape`` are drawn from; None for meta tensors, which have no values."""
    import torch

    return None if device.type == "meta" else torch.Generator(device).manual_seed(shape.seed)


def fill_normal(tensor: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Fill with normally distributed numbers, an fp8 tensor as quantised by 1 / FP8_SCALE."""
    import torch

    if tensor.itemsize > 1:
        return tensor.normal_(generator=generator)
    flat = tensor.view(-1)
    step = 2**28
    for part in flat.view(torch.uint8).split(step):
        values = torch.empty(part.shape, dtype=torch.bfloat16, device=part.device)
        quantised = (values.normal_(generator=generator) / FP8_SCALE).clamp(-448, 448)
        part.copy_(quantised.to(tensor.dtype).view(torch.uint8))
    return tensor


def scales_of(shape: Shape) -> dict[str, float]:
    """What the ops are told of an fp8 cache."""
    return {"k_scale": FP8_SCALE, "v_scale": FP8_SCALE} if is_fp8(shape) else {}


def is_fp8(shape: Shape) -> bool:
    return (shape.kv_dtype or "").startswith("float8")


def some_of(count: int) -> list[int]:
    """First, middle and last of so many."""
    return sorted({0, count // 2, count - 1})
