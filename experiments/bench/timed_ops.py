"""Ops at real sizes on the device: their implementations, each checked and then timed.

Inputs, references, bytes and operations are the cases of ``kernels/testing/cases.py``. Caches of
many gigabytes cannot be copied to fp64, so a result is judged on a part: some sequences (in
prefill their first, middle and last queries), tokens or blocks, as a small case with copies of
their inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from experiments.bench import gpu_timing
from experiments.bench.gpu_timing import Ceiling
from experiments.bench.shapes import (
    OURS,
    Shape,
    Timed,
    WrongResult,
    accuracy_columns,
    use_device,
)
from experiments.harness import Unavailable
from kernels import paged_decode_attention, reference
from kernels.testing.accuracy import Accuracy, bits
from kernels.testing.baselines import BASELINES
from kernels.testing.cases import Case, make_case

OPS = {
    "decode": "paged_decode_attention",
    "prefill": "paged_prefill_attention",
    "cascade": "shared_prefix_decode_attention",
    "store": "store_kvcache",
    "copy": "copy_blocks",
    "swap_out": "swap_blocks",
    "swap_in": "swap_blocks",
    "norm": "add_rms_norm",
    "gate": "gated_activation",
}
_QUERIES_CHECKED = 16
Part = tuple[Case, Callable[[Any], Any]]
"""A small case, and a function that takes the whole result, copies what was written to the large
inputs into the part's, and gives the part's result."""


@dataclass
class Problem:
    """An op at a shape, with implementations that work on the same inputs."""

    case: Case
    implementations: dict[str, Callable[[], Any]]
    part: Callable[[], Part]
    reset: Callable[[], object] = lambda: None
    """Undoes what an implementation wrote to the judged part of its inputs."""
    eager_only: frozenset[str] = frozenset()
    """Implementations that no CUDA graph can capture."""
    ceiling: Ceiling = "copy"
    """The measured rate that the bytes per second are compared with."""

    def judged(self, implementation: str) -> Accuracy:
        """The worst accuracy of an implementation's results.

        Raises Unavailable where its package does not have what it takes.
        """
        self.reset()
        part, fetch = self.part()
        try:
            result = self.implementations[implementation]()
        except NotImplementedError as error:
            raise Unavailable(f"{implementation}: {error}") from error
        judged = part.judge(lambda: fetch(result))
        return max(judged.values(), key=lambda accuracy: accuracy.error / accuracy.bound)


def _case(shape: Shape, device: torch.device) -> Case:
    sizes = {name: getattr(shape, name) for name in ("num_q_heads", "num_kv_heads", "head_dim")}
    sizes |= {name: getattr(shape, name) for name in ("block_size", "num_layers", "seed")}
    elements = shape.block_size * shape.num_kv_heads * shape.head_dim
    options = {}
    if shape.op in ("decode", "prefill", "cascade"):
        options["return_lse"] = False
    if shape.op in ("decode", "prefill"):
        options["num_splits"] = shape.num_splits
    if shape.op == "cascade":
        sizes |= {"prefix_lens": (shape.prefix_len,), "group_sizes": (shape.batch,)}
    return make_case(
        OPS[shape.op],
        **sizes,
        dtype=getattr(torch, shape.dtype),
        kv_dtype=getattr(torch, shape.kv_dtype or shape.dtype),
        context_lens=(shape.context_len - shape.prefix_len,) * shape.batch,
        query_lens=(shape.query_len,) * shape.batch,
        num_tokens=shape.batch,
        num_pairs=shape.batch,
        padded=False,
        features=("in",) if shape.op == "swap_in" else (),
        options=options,
        first_block=-(-shape.unused_elements // elements),
        device=device,
    )


def _some(count: int) -> list[int]:
    """First, middle and last of a number of things."""
    return sorted({0, count // 2, count - 1})


def _attention_part(case: Case, rows: list[tuple[int, int, int]]) -> Part:
    """Some queries of decode or prefill with a cache of their own.

    rows: sequence, first query and number of queries; the context ends with the last of them.
    """
    inputs, is_prefill = case.inputs, "cu_seqlens_q" in case.inputs
    device, block_size = inputs["q"].device, inputs["k_cache"].shape[1]
    lengths = inputs["context_lens"].tolist()
    starts = inputs["cu_seqlens_q"].tolist() if is_prefill else [*range(len(lengths) + 1)]
    contexts, queries, blocks = [], [], []
    for seq, first, count in rows:
        query_len = starts[seq + 1] - starts[seq]
        contexts.append(lengths[seq] - query_len + first + count)
        queries.append(torch.arange(starts[seq] + first, starts[seq] + first + count))
        blocks.append(inputs["block_tables"][seq, : -(-contexts[-1] // block_size)].long())
    tables = torch.zeros(len(rows), max(map(len, blocks)), dtype=torch.int32)
    used = 0
    for row, ids in enumerate(blocks):
        tables[row, : len(ids)] = torch.arange(used, used + len(ids))
        used += len(ids)
    queries, blocks = torch.cat(queries).to(device), torch.cat(blocks)
    small = {
        "q": inputs["q"][queries],
        "k_cache": _indexed(inputs["k_cache"], blocks),
        "v_cache": _indexed(inputs["v_cache"], blocks),
        "block_tables": tables.to(device),
        "context_lens": torch.tensor(contexts, dtype=torch.int32, device=device),
    }
    if is_prefill:
        counts = [count for _, _, count in rows]
        small["cu_seqlens_q"] = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
        small["max_seqlen_q"] = max(counts)
    return dataclasses.replace(case, inputs=inputs | small), lambda out: out[queries]


def _indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Copies of some elements, bit for bit: PyTorch does not index fp8 everywhere."""
    return bits(tensor)[index].view(tensor.dtype)


def _attention(shape: Shape, case: Case) -> Problem:
    names = ["q", "k_cache", "v_cache", "block_tables", "context_lens"]
    seqs, eager_only = _some(shape.batch), set()
    if shape.op == "prefill":
        names += ["cu_seqlens_q", "max_seqlen_q"]
        seqs = seqs[::2]
        eager_only = {name for name, baseline in BASELINES.items() if baseline.prefill_syncs}
    inputs = {name: case.inputs[name] for name in names}
    calls = {OURS: case.call}
    for name, baseline in BASELINES.items():
        calls[name] = functools.partial(getattr(baseline, shape.op), **inputs)
    count = min(_QUERIES_CHECKED, shape.query_len)
    firsts = sorted({0, (shape.query_len - count) // 2, shape.query_len - count})
    rows = list(itertools.product(seqs, firsts, [count]))
    return Problem(
        case,
        calls,
        functools.cache(functools.partial(_attention_part, case, rows)),
        eager_only=frozenset(eager_only),
    )


def _cascade(shape: Shape, case: Case) -> Problem:
    """Beside plain decode, which reads the prefix again for every sequence."""
    own = ("prefix_block_tables", "prefix_lens", "group_offsets")
    own += ("suffix_block_tables", "suffix_lens")
    whole = {name: x for name, x in case.inputs.items() if name not in own}
    prefix, _, _, suffixes, suffix_lens = (case.inputs[name] for name in own)
    prefix = prefix[:, : shape.prefix_len // shape.block_size].expand(shape.batch, -1)
    whole["block_tables"] = torch.cat([prefix, suffixes], dim=1)
    whole["context_lens"] = suffix_lens + shape.prefix_len
    plain = dataclasses.replace(case, op="paged_decode_attention", inputs=whole)
    rows = [(seq, 0, 1) for seq in _some(shape.batch)]
    calls = {
        OURS: case.call,
        "paged_decode": functools.partial(paged_decode_attention, **whole),
    }
    return Problem(case, calls, functools.cache(functools.partial(_attention_part, plain, rows)))


def _row_by_row(shape: Shape, case: Case) -> Problem:
    """Norm and gate."""
    rows, inputs = _some(shape.batch), case.inputs
    start = {name: inputs[name].clone() for name in case.writes}
    names = [name for name in ("x", "residual", "gate", "up") if name in inputs]

    def part() -> Part:
        some = {name: start.get(name, inputs[name])[rows] for name in names}

        def fetch(out: torch.Tensor) -> torch.Tensor:
            for name in start:
                some[name].copy_(inputs[name][rows])
            return out[rows]

        return dataclasses.replace(case, inputs=inputs | some), fetch

    def reset() -> None:
        for name, values in start.items():
            inputs[name].copy_(values)

    calls = {OURS: case.call, "torch": functools.partial(case.call, getattr(reference, case.op))}
    return Problem(case, calls, part, reset)


def _store(shape: Shape, case: Case) -> Problem:
    rows, inputs = _some(shape.batch), case.inputs
    slots, names = inputs["slot_mapping"], ("k_cache", "v_cache")
    caches = [inputs[name].flatten(0, 1) for name in names]

    def by_torch() -> None:
        for cache, new in zip(caches, (inputs["key"], inputs["value"]), strict=True):
            cache[slots] = new

    def part() -> Part:
        some = {name: inputs[name][rows] for name in ("key", "value")}
        some |= {
            name: _indexed(x, slots[rows])[None] for name, x in zip(names, caches, strict=True)
        }
        some["slot_mapping"] = torch.arange(len(rows), device=slots.device)

        def fetch(_: object) -> None:
            for name, cache in zip(names, caches, strict=True):
                bits(some[name]).copy_(bits(cache)[slots[rows]][None])

        return dataclasses.replace(case, inputs=inputs | some), fetch

    def reset() -> None:
        for cache in caches:
            cache.zero_()

    return Problem(case, {OURS: case.call, "torch_index_put": by_torch}, part, reset)


def _copy(shape: Shape, case: Case) -> Problem:
    caches, pairs = case.inputs["caches"], case.inputs["src_to_dst"]
    sources, targets = pairs.unbind(1)
    some = pairs[_some(shape.batch)]

    def by_torch() -> None:
        caches[:, :, targets] = caches[:, :, sources]

    def part() -> Part:
        blocks = some.flatten()
        small = _indexed(caches, (slice(None), slice(None), blocks))
        inputs = {"caches": small, "src_to_dst": torch.arange(len(blocks)).view(-1, 2).to(blocks)}

        def fetch(_: object) -> None:
            bits(small).copy_(bits(caches)[:, :, blocks])

        return dataclasses.replace(case, inputs=inputs), fetch

    def reset() -> None:
        bits(caches)[:, :, some[:, 1]] = 0

    return Problem(case, {OURS: case.call, "torch_index_put": by_torch}, part, reset)


def _swap(shape: Shape, case: Case) -> Problem:
    source, target, pairs = (case.inputs[x] for x in ("src_cache", "dst_cache", "src_to_dst"))
    places = list(itertools.product(range(2), range(shape.num_layers)))
    sources = [source[kv, layer, a] for a, _ in pairs.tolist() for kv, layer in places]
    targets = [target[kv, layer, b] for _, b in pairs.tolist() for kv, layer in places]
    some = pairs[_some(shape.batch)].cpu()

    def by_memcpy() -> None:  # one for each, from a loop in C++, as vLLM's swap_blocks
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def blocks(cache: torch.Tensor, column: int) -> torch.Tensor:
        return _indexed(cache, (slice(None), slice(None), some[:, column].to(cache.device)))

    def part() -> Part:
        small = {"src_cache": blocks(source, 0), "dst_cache": blocks(target, 1)}
        small["src_to_dst"] = torch.arange(len(some))[:, None].expand(-1, 2).to(pairs.device)

        def fetch(_: object) -> None:
            if pairs.is_cuda:  # before the host reads pinned memory
                torch.cuda.synchronize()
            bits(small["dst_cache"]).copy_(bits(blocks(target, 1)))

        return dataclasses.replace(case, inputs=small), fetch

    return Problem(
        case,
        {OURS: case.call, "memcpy": by_memcpy},
        part,
        reset=target.zero_,
        eager_only=frozenset({"memcpy"}),
        ceiling="device_to_host" if shape.op == "swap_out" else "host_to_device",
    )


_PROBLEMS: dict[str, Callable[[Shape, Case], Problem]] = {
    "decode": _attention,
    "prefill": _attention,
    "cascade": _cascade,
    "store": _store,
    "copy": _copy,
    "swap_out": _swap,
    "swap_in": _swap,
    "norm": _row_by_row,
    "gate": _row_by_row,
}


def refusal(shape: Shape, implementation: str) -> str | None:
    """Why an implementation cannot serve a shape here, or None; makes no inputs of real size."""
    device = use_device()
    if implementation in BASELINES:
        dtypes = [getattr(torch, name) for name in (shape.dtype, shape.kv_dtype or shape.dtype)]
        q = torch.empty(1, shape.num_q_heads, shape.head_dim, dtype=dtypes[0], device=device)
        block = (1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        k_cache = torch.empty(block, dtype=dtypes[1], device=device)
        return BASELINES[implementation].unavailable(q, k_cache)
    is_fp8 = (shape.kv_dtype or "").startswith("float8")
    if implementation == "torch_index_put" and shape.op == "store" and is_fp8:
        return "it does not quantise"
    return None


_kept: dict[Shape, Problem] = {}


def problem_of(shape: Shape) -> Problem:
    """The problem at ``shape``. The last one is kept; it is freed before the next is made, since
    the inputs of either may fill the card."""
    if shape not in _kept:
        release()
        _kept[shape] = _PROBLEMS[shape.op](shape, _case(shape, use_device()))
    return _kept[shape]


def release() -> None:
    """Free the device memory of the last problem."""
    _kept.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(cell: Timed) -> dict[str, Any]:
    """The row of a cell: an implementation at a shape, its accuracy and its times.

    Times are None without a CUDA device. Raises Unavailable where the implementation cannot run
    here, and WrongResult.
    """
    shape, name = cell.shape, cell.implementation
    if reason := refusal(shape, name):
        raise Unavailable(f"{name}: {reason}")
    try:
        problem = problem_of(shape)
        accuracy = problem.judged(name)
        if not accuracy.passed:
            raise WrongResult(
                f"{name} is wrong: error {accuracy.error:.3g}, bound {accuracy.bound:.3g}; "
                "no time is reported"
            )
        times = gpu_timing.timed_columns(
            problem.implementations[name],
            num_bytes=problem.case.num_bytes,
            flops=problem.case.flops,
            ceiling=problem.ceiling,
            launch="eager" if name in problem.eager_only else "graph",
            budget_ms=cell.budget_ms,
        )
    except torch.OutOfMemoryError as error:
        release()
        raise Unavailable(str(error).split(". ")[0]) from None
    return {**shape.columns(), "implementation": name, **accuracy_columns(accuracy), **times}
