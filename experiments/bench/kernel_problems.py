"""Problems of real size for the data-path kernels: inputs made on the device, and what is right.

A problem is an op at a shape, with the implementations of it that are to be compared, the fewest
bytes and operations that it takes, and a check of a result by the rule of
``kernels/testing/accuracy.py``.  How they are made: ``attention_problems.py``,
``layer_problems.py`` and ``move_problems.py``.  ``run`` gives a row of a table: an implementation
at a shape, checked and timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from experiments.bench import gpu_timing
from experiments.bench.attention_problems import attention_problem, cascade_problem
from experiments.bench.layer_problems import gate_problem, norm_problem
from experiments.bench.move_problems import (
    copy_problem,
    store_problem,
    swap_in_problem,
    swap_out_problem,
)
from experiments.bench.problem import (
    Launch,
    Problem,
    Shape,
    WrongResult,
    accuracy_columns,
    dtypes,
    is_fp8,
    use_device,
)
from experiments.harness import Unavailable
from kernels.testing.baselines import BASELINES

OPS: dict[str, Callable[[Shape, torch.device], Problem]] = {
    "decode": attention_problem,
    "prefill": attention_problem,
    "cascade": cascade_problem,
    "store": store_problem,
    "copy": copy_problem,
    "swap_out": swap_out_problem,
    "swap_in": swap_in_problem,
    "norm": norm_problem,
    "gate": gate_problem,
}
"""Problems by the name of their op."""


def refusal(shape: Shape, implementation: str) -> str | None:
    """Why an implementation cannot serve a shape here, or None; no problem need be made for it."""
    device = use_device()
    if implementation in BASELINES:
        dtype, kv_dtype = dtypes(shape)
        q = torch.empty(1, shape.num_q_heads, shape.head_dim, dtype=dtype, device=device)
        block = (1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        k_cache = torch.empty(block, dtype=kv_dtype, device=device)
        return BASELINES[implementation].unavailable(q, k_cache)
    if implementation == "torch_index_put" and shape.op == "store" and is_fp8(shape):
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
    _kept.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
        **accuracy_columns(accuracy),
        **times,
    }
