"""Ops at real sizes on the device.  Each implementation is checked and then timed.

Inputs, references, bytes and operations are the cases of ``kernels/testing/cases.py``. The context
of attention may be too large for an fp64 reference.  So attention is judged on some sequences (in
prefill on their first, middle and last queries), with copies of their inputs.
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
    COPY_ENGINE,
    OURS,
    Shape,
    Timed,
    WrongResult,
    accuracy_columns,
    use_device,
)
from experiments.harness import Unavailable
from kernels import reference
from kernels.swap_blocks import adjacent_parts
from kernels.testing.accuracy import Accuracy, bits
from kernels.testing.baselines import BASELINES
from kernels.testing.cases import OPS as RECORDS
from kernels.testing.cases import make_case
from kernels.testing.op import Case

OPS = {name: op for op, record in RECORDS.items() for name in record.timed}
_CEILINGS: dict[str, Ceiling] = {"swap_out": "device_to_host", "swap_in": "host_to_device"}
"""Ops whose bytes per second are compared with the rate of the link to the host."""
_QUERIES_CHECKED = 16
_CACHES = ("k_cache", "v_cache")
Part = tuple[Case, Callable[[Any], Any]]
"""A small case, and a function that extracts its result from the whole result."""


@dataclass(frozen=True)
class Problem:
    """An op at a shape, with implementations that work on the same inputs."""

    case: Case
    implementations: dict[str, Callable[[], Any]]
    part: Part | None = None
    """The judged part of the result. None means all of it."""

    def judged(self, implementation: str) -> Accuracy:
        """The worst accuracy of an implementation's results."""
        call = self.implementations[implementation]
        case, fetch = self.part or (self.case, lambda result: result)
        judged = case.judge(lambda: fetch(call()))
        return max(judged.values(), key=lambda accuracy: accuracy.error / accuracy.bound)


def case_of(shape: Shape, device: torch.device) -> Case:
    """Inputs of an op at ``shape``.  On the device meta they use no memory."""
    names = ("num_q_heads", "num_kv_heads", "head_dim", "block_size", "num_layers", "seed")
    sizes = {name: getattr(shape, name) for name in names}
    options: dict[str, Any] = {}
    if shape.op in ("decode", "prefill", "cascade", "mla"):
        options["return_lse"] = False
    if shape.op in ("decode", "prefill", "mla"):
        options["num_splits"] = shape.num_splits
    if shape.op == "cascade":
        sizes |= {"prefix_lens": (shape.prefix_len,), "group_sizes": (shape.batch,)}
    return make_case(
        OPS[shape.op], **sizes,
        dtype=getattr(torch, shape.dtype), kv_dtype=getattr(torch, shape.kv_dtype or shape.dtype),
        context_lens=(shape.context_len - shape.prefix_len,) * shape.batch,
        query_lens=(shape.query_len,) * shape.batch,
        num_tokens=shape.batch, num_pairs=shape.batch, padded=False,
        options=options, device=device, **RECORDS[OPS[shape.op]].timed[shape.op],
    )  # fmt: skip


def _some(count: int) -> list[int]:
    """Indices of the first, middle and last of ``count`` elements."""
    return sorted({0, count // 2, count - 1})


def _attention_part(case: Case, rows: list[tuple[int, int, int]]) -> Part:
    """A case with some queries of decode or prefill and a small cache for them.

    rows: (sequence, first query, number of queries).  The context ends with the last query.
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
    for row, of_row in enumerate(blocks):
        tables[row, : len(of_row)] = torch.arange(used, used + len(of_row))
        used += len(of_row)
    rows_of_q, ids = torch.cat(queries).to(device), torch.cat(blocks)
    small = {
        "q": inputs["q"][rows_of_q],
        # Bit for bit: PyTorch does not index fp8 everywhere.
        **{name: bits(inputs[name])[ids].view(inputs[name].dtype) for name in _CACHES},
        "block_tables": tables.to(device),
        "context_lens": torch.tensor(contexts, dtype=torch.int32, device=device),
    }
    if is_prefill:
        counts = [count for _, _, count in rows]
        small["cu_seqlens_q"] = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
        small["max_seqlen_q"] = max(counts)
    return dataclasses.replace(case, inputs=inputs | small), lambda out: out[rows_of_q]


def _problem(shape: Shape, case: Case) -> Problem:
    calls: dict[str, Callable[[], Any]] = {OURS: case.call}
    rows = [(seq, 0, 1) for seq in _some(shape.batch)]
    if shape.op in ("norm", "gate"):
        calls["torch"] = functools.partial(case.call, getattr(reference, case.op))
    if shape.op in ("swap_out", "swap_in"):
        pairs = case.inputs["src_to_dst"].cpu()
        calls[COPY_ENGINE] = functools.partial(
            _by_copy_engine, **case.inputs | {"src_to_dst": pairs}
        )
    if shape.op == "cascade":
        plain = _plain_decode(shape, case)
        calls["paged_decode"] = plain.call
        return Problem(case, calls, _attention_part(plain, rows))
    if shape.op not in ("decode", "prefill"):
        return Problem(case, calls)
    names = ["q", "k_cache", "v_cache", "block_tables", "context_lens"]
    if shape.op == "prefill":
        names += ["cu_seqlens_q", "max_seqlen_q"]
        count = min(_QUERIES_CHECKED, shape.query_len)
        firsts = sorted({0, (shape.query_len - count) // 2, shape.query_len - count})
        rows = list(itertools.product(_some(shape.batch)[::2], firsts, [count]))
    inputs = {name: case.inputs[name] for name in names}
    for name, baseline in BASELINES.items():
        calls[name] = functools.partial(getattr(baseline, shape.op), **inputs)
    return Problem(case, calls, _attention_part(case, rows))


def _by_copy_engine(src_cache, dst_cache, src_to_dst) -> None:
    for target, source in adjacent_parts(src_cache, dst_cache, src_to_dst):
        target.copy_(source, non_blocking=True)


def _plain_decode(shape: Shape, case: Case) -> Case:
    """Plain decode of a cascade's sequences.  It reads the prefix again for every sequence."""
    own = ["prefix_block_tables", "prefix_lens", "group_offsets"]
    own += ["suffix_block_tables", "suffix_lens"]
    whole = {name: x for name, x in case.inputs.items() if name not in own}
    prefix, _, _, suffixes, suffix_lens = (case.inputs[name] for name in own)
    prefix = prefix[:, : shape.prefix_len // shape.block_size].expand(shape.batch, -1)
    whole["block_tables"] = torch.cat([prefix, suffixes], dim=1)
    whole["context_lens"] = suffix_lens + shape.prefix_len
    return dataclasses.replace(case, op="paged_decode_attention", inputs=whole)


def refusal(shape: Shape, implementation: str) -> str | None:
    """Why a baseline cannot run a shape here, or None.  Allocates no inputs of real size."""
    if implementation not in BASELINES:
        return None
    dtypes = [getattr(torch, name) for name in (shape.dtype, shape.kv_dtype or shape.dtype)]
    device = use_device()
    q = torch.empty(1, shape.num_q_heads, shape.head_dim, dtype=dtypes[0], device=device)
    block = (1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    k_cache = torch.empty(block, dtype=dtypes[1], device=device)
    return BASELINES[implementation].unavailable(q, k_cache)


@functools.lru_cache(maxsize=1)
def problem_of(shape: Shape) -> Problem:
    """The problem at ``shape``, cached.

    The cached problem of another shape is freed first: one problem may fill the card.
    """
    release()
    return _problem(shape, case_of(shape, use_device()))


def release() -> None:
    """Free the device memory of the cached problem."""
    problem_of.cache_clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(cell: Timed) -> dict[str, Any]:
    """The row of a cell: implementation, shape, accuracy and times (None without a CUDA device).

    Raises Unavailable if the implementation cannot run here or is a baseline that raises, and
    WrongResult and ImpossibleTime for implementations that are not baselines.
    """
    shape, name = cell.shape, cell.implementation
    try:
        if reason := refusal(shape, name):
            raise Unavailable(f"{name}: {reason}")
        problem = problem_of(shape)
        accuracy = problem.judged(name)
        if not accuracy.passed:
            raise WrongResult(
                f"{name} is wrong: error {accuracy.error:.3g}, bound {accuracy.bound:.3g}; "
                "no time is reported"
            )
        syncs = shape.op == "prefill" and name in BASELINES and BASELINES[name].prefill_syncs
        # A graph cannot capture a call that waits for the device.
        launch: gpu_timing.LaunchMode = "eager" if syncs or name == COPY_ENGINE else "graph"
        times = gpu_timing.Times()
        if torch.cuda.is_available():
            call = problem.implementations[name]
            times = gpu_timing.time_call(call, launch=launch, budget_ms=cell.budget_ms)
        columns = gpu_timing.timed_columns(
            times,
            num_bytes=problem.case.num_bytes,
            flops=problem.case.flops,
            ceiling=_CEILINGS.get(shape.op, "device"),
            launch=launch,
        )
        about = {**shape.columns(), "implementation": name}
        return {**about, **accuracy_columns(accuracy), **columns}
    except torch.OutOfMemoryError as error:
        release()
        raise Unavailable(str(error).split(". ")[0]) from error
    except Exception as error:
        if isinstance(error, Unavailable) or name not in BASELINES:
            raise
        text = str(error).strip().partition("\n")[0]
        raise Unavailable(f"{name}: {type(error).__name__}: {text}") from error
