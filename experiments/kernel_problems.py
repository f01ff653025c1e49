"""Problems of real size for the data-path kernels: inputs made on the device, and what is right.

A problem is an op at a shape, with the implementations of it that are to be compared, the fewest
bytes and operations that it takes, and a check of a result by the rule of ``kernels/accuracy.py``.
Caches of many gigabytes cannot be copied to fp64, so attention is checked for some sequences (of
prefill: for their first, middle and last queries), whose blocks alone are copied.  Block tables are
shuffled, and slots that hold no token are NaN.

``kernels`` is imported inside, because TRITON_INTERPRET must be set before it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments import gpu_timing
from experiments.gpu_timing import Ceiling, Launch
from experiments.harness import Unavailable

if TYPE_CHECKING:
    import torch

    from kernels.accuracy import Accuracy, PagedBatch

OURS = "pagelab"
"""What our kernels are called among the implementations."""
_FP8_SCALE = 1 / 64
_QUERIES_CHECKED = 16


class WrongResult(Exception):
    """A result beyond the bound; nothing is reported of its time."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a problem depends on."""

    op: str
    """A key of ``OPS``."""
    batch: int
    """Sequences; for store, tokens; for copy and swap, blocks."""
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
    """Programs that share a sequence's tokens in decode; the op's own choice if None."""
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


def use_device() -> torch.device:
    """The GPU, or a CPU with kernels in Triton's interpreter; before ``kernels`` is imported."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")


def refusal(shape: Shape, implementation: str) -> str | None:
    """Why an implementation cannot serve a shape here, or None; no problem need be made for it."""
    import torch

    device = use_device()
    from kernels.baselines import BASELINES

    if implementation in BASELINES:
        dtype, kv_dtype = _dtypes(shape)
        q = torch.empty(1, shape.num_q_heads, shape.head_dim, dtype=dtype, device=device)
        block = (1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        k_cache = torch.empty(block, dtype=kv_dtype, device=device)
        return BASELINES[implementation].unavailable(q, k_cache)
    if implementation == "torch_index_put" and shape.op == "store" and _is_fp8(shape):
        return "it does not quantise"
    return None


_kept: dict[Shape, Problem] = {}


def problem_of(shape: Shape) -> Problem:
    """The problem at ``shape``.  The last one is kept; it goes before the next is made, since the
    inputs of either may fill the card."""
    if shape not in _kept:
        release()
        _kept[shape] = OPS[shape.op](shape, use_device())
    return _kept[shape]


def release() -> None:
    """Free the device memory of the last problem."""
    import torch

    _kept.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _dtypes(shape: Shape) -> tuple[torch.dtype, torch.dtype]:
    import torch

    return getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype or shape.dtype)


def _normal(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill with normally distributed numbers, an fp8 tensor as quantised by 1 / _FP8_SCALE."""
    import torch

    if tensor.itemsize > 1:
        return tensor.normal_(generator=generator)
    flat = tensor.view(-1)
    step = 2**28
    for part in flat.view(torch.uint8).split(step):
        values = torch.empty(part.shape, dtype=torch.bfloat16, device=part.device)
        quantised = (values.normal_(generator=generator) / _FP8_SCALE).clamp(-448, 448)
        part.copy_(quantised.to(tensor.dtype).view(torch.uint8))
    return tensor


def _scales(shape: Shape) -> dict[str, float]:
    """What the ops are told of an fp8 cache."""
    return {"k_scale": _FP8_SCALE, "v_scale": _FP8_SCALE} if _is_fp8(shape) else {}


def _is_fp8(shape: Shape) -> bool:
    return (shape.kv_dtype or "").startswith("float8")


def _paged_batch(shape: Shape, device: torch.device) -> PagedBatch:
    """Sequences of equal length in a shuffled cache; slots without a token hold NaN."""
    import torch

    from kernels.accuracy import PagedBatch, bits

    dtype, kv_dtype = _dtypes(shape)
    generator = torch.Generator(device).manual_seed(shape.seed)
    blocks_per_seq = -(-shape.context_len // shape.block_size)
    used = shape.batch * blocks_per_seq
    elements = shape.block_size * shape.num_kv_heads * shape.head_dim
    num_blocks = max(used + 3, -(-shape.min_cache_elements // elements))
    first = num_blocks - used
    tables = first + torch.randperm(used, generator=generator, device=device)
    tables = tables.view(shape.batch, blocks_per_seq)
    sizes = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    nan = bits(torch.tensor(torch.nan).to(kv_dtype))
    caches = []
    for _ in range(2):
        cache = torch.empty(sizes, dtype=kv_dtype, device=device)
        _normal(cache, generator)
        as_bits = bits(cache)
        as_bits[: min(first, 3)] = nan.to(device)
        if tail := shape.context_len % shape.block_size:
            as_bits[tables[:, -1], tail:] = nan.to(device)
        caches.append(cache)
    rows = shape.batch * shape.query_len
    q = torch.empty(rows, shape.num_q_heads, shape.head_dim, dtype=dtype, device=device)
    starts = torch.arange(shape.batch + 1, device=device) * shape.query_len
    return PagedBatch(
        q=q.normal_(generator=generator),
        k_cache=caches[0],
        v_cache=caches[1],
        block_tables=tables.to(torch.int32),
        context_lens=torch.full((shape.batch,), shape.context_len, device=device).int(),
        cu_seqlens_q=starts.int(),
    )


def _sample(batch: PagedBatch, rows: list[tuple[int, int, int]]) -> tuple[PagedBatch, torch.Tensor]:
    """A small batch with its own cache, and which queries of ``batch`` are its queries.

    rows: sequence, first query and number of queries; its context ends with the last of them.
    """
    import torch

    from kernels.accuracy import PagedBatch

    device, block_size = batch.q.device, batch.k_cache.shape[1]
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
    contexts, queries, blocks = [], [], []
    for seq, first, count in rows:
        query_len = starts[seq + 1] - starts[seq]
        contexts.append(lengths[seq] - query_len + first + count)
        queries.append(torch.arange(starts[seq] + first, starts[seq] + first + count))
        blocks.append(batch.block_tables[seq, : -(-contexts[-1] // block_size)].long())
    tables = torch.zeros(len(rows), max(map(len, blocks)), dtype=torch.int32)
    used = 0
    for row, ids in enumerate(blocks):
        tables[row, : len(ids)] = torch.arange(used, used + len(ids))
        used += len(ids)
    ids, queries = torch.cat(blocks), torch.cat(queries).to(device)
    counts = torch.tensor([0, *(count for _, _, count in rows)])
    small = PagedBatch(
        q=batch.q[queries],
        k_cache=_blocks(batch.k_cache, ids),
        v_cache=_blocks(batch.v_cache, ids),
        block_tables=tables.to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        cu_seqlens_q=counts.cumsum(0).to(device, torch.int32),
    )
    return small, queries


def _blocks(cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Copies of some blocks, bit for bit: PyTorch does not index fp8 everywhere."""
    from kernels.accuracy import bits

    return bits(cache)[ids].view(cache.dtype)


def _judge(op: str, batch: PagedBatch, rows: list, **options: Any) -> Callable:
    """How a result for ``batch`` is judged: on some rows, against the twin of ``op``."""
    from kernels import reference
    from kernels.accuracy import accuracy

    small, queries = _sample(batch, rows)
    twin = getattr(reference, op)
    if op == "paged_prefill_attention":
        options["max_seqlen_q"] = max(count for _, _, count in rows)
        args, wide = small.prefill_args, small.double().prefill_args
    else:
        args, wide = small.decode_args, small.double().decode_args
    low, ref = twin(*args, **options), twin(*wide, **options)
    return lambda out: accuracy(out[queries], low, ref)


def _some(count: int) -> list[int]:
    """First, middle and last of so many."""
    return sorted({0, count // 2, count - 1})


def _attention_bytes(shape: Shape, kv_tokens: int) -> int:
    """K and V of so many tokens, queries and output."""
    dtype, kv_dtype = _dtypes(shape)
    kv = 2 * kv_tokens * shape.num_kv_heads * shape.head_dim * kv_dtype.itemsize
    rows = shape.batch * shape.query_len * shape.num_q_heads * shape.head_dim
    return kv + 2 * rows * dtype.itemsize


def _decode(shape: Shape, device: torch.device) -> Problem:
    from kernels import paged_decode_attention
    from kernels.baselines import BASELINES

    batch = _paged_batch(shape, device)
    scales = _scales(shape)
    options = {"num_splits": shape.num_splits, **scales}
    calls = {OURS: lambda: paged_decode_attention(*batch.decode_args, **options)}
    for name, baseline in BASELINES.items():
        calls[name] = functools.partial(baseline.decode, *batch.decode_args)
    return Problem(
        num_bytes=_attention_bytes(shape, shape.batch * shape.context_len),
        flops=4 * shape.batch * shape.context_len * shape.num_q_heads * shape.head_dim,
        implementations=calls,
        check=_judge(
            "paged_decode_attention",
            batch,
            [(seq, 0, 1) for seq in _some(shape.batch)],
            **scales,
        ),
    )


def _prefill(shape: Shape, device: torch.device) -> Problem:
    from kernels import paged_prefill_attention
    from kernels.baselines import BASELINES

    batch = _paged_batch(shape, device)
    scales, longest = _scales(shape), shape.query_len
    calls = {
        OURS: lambda: paged_prefill_attention(*batch.prefill_args, max_seqlen_q=longest, **scales)
    }
    for name, baseline in BASELINES.items():
        calls[name] = functools.partial(baseline.prefill, *batch.prefill_args, max_seqlen_q=longest)
    count = min(_QUERIES_CHECKED, longest)
    pieces = sorted({0, (longest - count) // 2, longest - count})
    visible = longest * (shape.context_len - longest) + longest * (longest + 1) // 2
    return Problem(
        num_bytes=_attention_bytes(shape, shape.batch * shape.context_len),
        flops=4 * shape.batch * visible * shape.num_q_heads * shape.head_dim,
        implementations=calls,
        check=_judge(
            "paged_prefill_attention",
            batch,
            [(seq, first, count) for seq in _some(shape.batch)[::2] for first in pieces],
            **scales,
        ),
        eager_only=frozenset(n for n, baseline in BASELINES.items() if baseline.prefill_syncs),
    )


def _cascade(shape: Shape, device: torch.device) -> Problem:
    """Decode of sequences that share their first prefix_len tokens, which fill whole blocks."""
    import torch

    from kernels import paged_decode_attention, shared_prefix_decode_attention
    from kernels.accuracy import PagedBatch, bits

    if shape.prefix_len % shape.block_size:
        raise ValueError(
            f"prefix_len: needs a multiple of block_size={shape.block_size}, got {shape.prefix_len}"
        )
    suffix_len = shape.context_len - shape.prefix_len
    part = functools.partial(dataclasses.replace, shape, prefix_len=0)
    own = _paged_batch(part(context_len=suffix_len), device)
    prefix = _paged_batch(part(batch=1, context_len=shape.prefix_len, seed=shape.seed + 1), device)
    caches = [
        torch.cat([bits(a), bits(b)]).view(a.dtype)
        for a, b in ((own.k_cache, prefix.k_cache), (own.v_cache, prefix.v_cache))
    ]
    prefix_table = prefix.block_tables + len(own.k_cache)
    whole = PagedBatch(
        own.q,
        *caches,
        torch.cat([prefix_table.expand(shape.batch, -1), own.block_tables], dim=1),
        own.context_lens + shape.prefix_len,
        own.cu_seqlens_q,
    )
    groups = torch.tensor([0, shape.batch], dtype=torch.int32, device=device)
    scales = _scales(shape)
    shared = (own.q, *caches, prefix_table, prefix.context_lens, groups)
    return Problem(
        num_bytes=_attention_bytes(shape, shape.prefix_len + shape.batch * suffix_len),
        flops=4 * shape.batch * shape.context_len * shape.num_q_heads * shape.head_dim,
        implementations={
            OURS: lambda: shared_prefix_decode_attention(
                *shared, own.block_tables, own.context_lens, **scales
            ),
            "paged_decode": lambda: paged_decode_attention(*whole.decode_args, **scales),
        },
        check=_judge(
            "paged_decode_attention",
            whole,
            [(seq, 0, 1) for seq in _some(shape.batch)],
            **scales,
        ),
    )


def _exact(pairs: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]) -> Callable:
    """A check of moved memory: the tensors of each pair agree bit for bit."""
    from kernels.accuracy import Accuracy, bits

    def check(_: object) -> Accuracy:
        same = all((bits(a).cpu() == bits(b).cpu()).all() for a, b in pairs())
        return Accuracy(error=0.0 if same else math.inf, eager_error=0.0)

    return check


def _store(shape: Shape, device: torch.device) -> Problem:
    """``batch`` tokens to random slots among twice as many."""
    import torch

    from kernels import reference, store_kvcache
    from kernels.accuracy import bits

    dtype, kv_dtype = _dtypes(shape)
    generator = torch.Generator(device).manual_seed(shape.seed)
    elements = shape.block_size * shape.num_kv_heads * shape.head_dim
    num_blocks = 2 * -(-shape.batch // shape.block_size)
    num_blocks = max(num_blocks, -(-shape.min_cache_elements // elements))
    sizes = (2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    caches = torch.zeros(sizes, dtype=kv_dtype, device=device)
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    qkv = torch.empty(shape.batch, heads, shape.head_dim, dtype=dtype, device=device)
    key, value = qkv.normal_(generator=generator)[:, shape.num_q_heads :].chunk(2, dim=1)
    room = 2 * shape.batch
    slots = torch.randperm(room, generator=generator, device=device)[: shape.batch]
    slots += num_blocks * shape.block_size - room
    scales = _scales(shape)

    def by_torch() -> None:
        for cache, new in zip(caches, (key, value), strict=True):
            cache.view(-1, *sizes[3:])[slots] = new

    some = torch.tensor(_some(shape.batch), device=device)
    rows = [
        (cache.view(-1, *sizes[3:]), x[some]) for cache, x in zip(caches, (key, value), strict=True)
    ]
    if scales:
        rows = [(cache, reference.quantise(x, _FP8_SCALE)) for cache, x in rows]
    moved = shape.batch * shape.num_kv_heads * shape.head_dim
    return Problem(
        num_bytes=2 * moved * (dtype.itemsize + kv_dtype.itemsize) + slots.nbytes,
        flops=0,
        implementations={
            OURS: lambda: store_kvcache(key, value, *caches, slots, **scales),
            "torch_index_put": by_torch,
        },
        check=_exact(lambda: [(bits(cache)[slots[some]].view(x.dtype), x) for cache, x in rows]),
        reset=caches.zero_,
    )


def _moved_blocks(
    shape: Shape, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor
) -> dict[str, Any]:
    """Bytes, check and reset of ops that copy whole blocks."""
    from kernels.accuracy import bits

    some = [tuple(pair) for pair in pairs[_some(len(pairs))].tolist()]

    def reset() -> None:
        for _, block in some:
            bits(target[:, :, block]).zero_()

    return {
        "num_bytes": len(pairs) * source[:, :, 0].nbytes,
        "flops": 0,
        "check": _exact(lambda: [(source[:, :, a], target[:, :, b]) for a, b in some]),
        "reset": reset,
    }


def _block_cache(shape: Shape, num_blocks: int, device, **options: Any) -> torch.Tensor:
    import torch

    sizes = (2, shape.num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return torch.empty(sizes, dtype=_dtypes(shape)[1], device=device, **options)


def _copy(shape: Shape, device: torch.device) -> Problem:
    """``batch`` blocks of every layer copied to others of the same cache."""
    import torch

    from kernels import copy_blocks

    elements = shape.block_size * shape.num_kv_heads * shape.head_dim * 2 * shape.num_layers
    num_blocks = max(2 * shape.batch, -(-shape.min_cache_elements // elements))
    generator = torch.Generator(device).manual_seed(shape.seed)
    caches = _normal(_block_cache(shape, num_blocks, device), generator)
    ids = torch.randperm(2 * shape.batch, generator=generator, device=device)
    pairs = (ids + num_blocks - len(ids)).view(-1, 2)
    sources, targets = pairs.unbind(1)

    def by_torch() -> None:
        caches[:, :, targets] = caches[:, :, sources]

    moved = _moved_blocks(shape, caches, caches, pairs)
    return Problem(
        **moved | {"num_bytes": 2 * moved["num_bytes"]},
        implementations={OURS: lambda: copy_blocks(caches, pairs), "torch_index_put": by_torch},
    )


def _swap(shape: Shape, device: torch.device, *, out: bool) -> Problem:
    """``batch`` blocks of every layer to pinned host memory, or from there."""
    import torch

    from kernels import swap_blocks

    generator = torch.Generator(device).manual_seed(shape.seed)
    on_gpu = _normal(_block_cache(shape, 2 * shape.batch, device), generator)
    on_host = _block_cache(shape, shape.batch, "cpu", pin_memory=device.type == "cuda")
    on_host.copy_(on_gpu[:, :, : shape.batch])
    gpu_ids = torch.randperm(2 * shape.batch, generator=generator, device=device)[: shape.batch]
    host_ids = torch.randperm(shape.batch, generator=generator, device=device)
    if out:
        source, target, pairs = on_gpu, on_host, torch.stack([gpu_ids, host_ids], dim=1)
    else:
        source, target, pairs = on_host, on_gpu, torch.stack([host_ids, gpu_ids], dim=1)
    on_the_host = pairs.tolist()

    def by_memcpy() -> None:
        for a, b in on_the_host:
            for kv in range(2):
                for layer in range(shape.num_layers):
                    target[kv, layer, b].copy_(source[kv, layer, a], non_blocking=True)

    def finished(call: Callable[[], None]) -> Callable[[], None]:
        """So that the host may read what has been copied."""

        def check(result: object) -> Accuracy:
            if device.type == "cuda":
                torch.cuda.synchronize()
            return call(result)

        return check

    moved = _moved_blocks(shape, source, target, pairs)
    return Problem(
        **moved | {"check": finished(moved["check"])},
        implementations={OURS: lambda: swap_blocks(source, target, pairs), "memcpy": by_memcpy},
        eager_only=frozenset({"memcpy"}),
        ceiling="device_to_host" if out else "host_to_device",
    )


OPS: dict[str, Callable[[Shape, torch.device], Problem]] = {
    "decode": _decode,
    "prefill": _prefill,
    "cascade": _cascade,
    "store": _store,
    "copy": _copy,
    "swap_out": functools.partial(_swap, out=True),
    "swap_in": functools.partial(_swap, out=False),
}
"""Problems by the name of their op."""


def run(
    shape: Shape, implementation: str, *, launch: Launch = "graph", budget_ms: float = 60.0
) -> dict[str, Any]:
    """One row: an implementation at a shape, how right it is and how long it takes.

    Times are None without a CUDA device.  Raises Unavailable where the implementation cannot run
    here, and WrongResult.
    """
    if reason := refusal(shape, implementation):
        raise Unavailable(f"{implementation}: {reason}")
    with gpu_timing.out_of_memory_is(Unavailable):
        problem = problem_of(shape)
        accuracy = problem.judged(implementation)
        if not accuracy.passed:
            raise WrongResult(
                f"{implementation} is wrong: error {accuracy.error:.3g}, bound "
                f"{accuracy.bound:.3g}; no time is reported"
            )
        if implementation in problem.eager_only:
            launch = "eager"
        times = gpu_timing.timed_columns(
            problem.implementations[implementation],
            num_bytes=problem.num_bytes,
            flops=problem.flops,
            ceiling=problem.ceiling,
            launch=launch,
            budget_ms=budget_ms,
        )
    return {
        **shape.columns(),
        "implementation": implementation,
        "error": accuracy.error,
        "eager_error": accuracy.eager_error,
        "bound": accuracy.bound,
        **times,
    }
