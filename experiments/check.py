"""``pagelab check``: compare the kernel of a file with fp64, in processes that it may crash."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.bench.shapes import use_device
from experiments.harness import Options, OptionsError
from experiments.harness.workers import Task, run_locally
from experiments.kernel_accuracy import KERNELS, KernelAccuracy

_SPLITS = (1, 2, 3, 7, 64)
"""Values of ``num_splits``.  64 are more chunks than the tokens of a case fill."""
_LENGTHS = {"context_lens": (1, 37, 430), "query_lens": (1, 9, 4)}
"""Lengths in the cases with splits: 7 chunks in Triton's interpreter and of GPU tiles of 64."""
_RED, _PLAIN = "\033[31m", "\033[0m"


@dataclass(frozen=True, kw_only=True)
class _Case(Options):
    """A call of the op that ``file`` defines."""

    file: str
    op: str
    feature: str
    """One of the op's features, "none", or "splits N"."""
    dtype: str
    block_size: int

    @property
    def group(self) -> tuple[str, ...]:
        return (self.dtype,)

    def __str__(self) -> str:
        blocks = f", block size {self.block_size}" if KERNELS[self.op].has_blocks else ""
        return f"{self.feature}, {self.dtype}{blocks}"


class _ImportFailed(Exception):
    """The file of the op cannot be imported."""


def check_kernel(
    file: Path,
    *,
    dtypes: Sequence[str] = KernelAccuracy.dtype,
    block_sizes: Sequence[int] = (1, 7, 256),
) -> bool:
    """Compare an op's results with fp64 over block sizes, dtypes, features and numbers of splits.

    Worker processes run the cases.  There, the file stands in for ``kernels/<op>.py``.  Prints the
    largest error / bound of each case, a row for each feature and dtype, and a line for each case
    that is wrong, raises an error or ends its process.  Returns whether no case does.

    Args:
        file: a file that defines one op of ``kernels``, such as kernels/store_kvcache.py or a
            changed copy of it.

    Raises OptionsError for any other file and for a file that cannot be imported.
    """
    op = _op_of(file)
    kernel = KERNELS[op]
    features = [feature for feature in kernel.features if feature != "split"]
    if "split" in kernel.features:
        features += [f"splits {number}" for number in _SPLITS]
    sizes = block_sizes if kernel.has_blocks else block_sizes[:1]
    dtypes = [dtype for dtype in dtypes if dtype != "fp8" or kernel.touches_cache]
    cases = [
        _Case(file=str(file), op=op, feature=feature, dtype=dtype, block_size=size)
        for dtype in dtypes
        for feature in features
        for size in sizes
    ]
    print(f"{op}: largest error / bound of {len(cases)} cases")
    if kernel.has_blocks:
        print(f"{'block size':22}" + "".join(f"{size:7}" for size in sizes), flush=True)
    tasks = [Task(str(number), _run, case) for number, case in enumerate(cases)]
    rows, num_results, num_failed = defaultdict[tuple, dict[int, str]](dict), 0, 0
    for outcome in run_locally(tasks, jobs=min(len(dtypes), len(os.sched_getaffinity(0)))):
        case, results = cases[int(outcome.key)], outcome.rows
        kind, _, message = outcome.message.partition(": ")
        if kind == _ImportFailed.__name__:
            raise OptionsError(f"{file}: importing it failed: {message}")
        wrong = [result for result in results if not result["passed"]]
        if outcome.status == "failed":
            _say(f"FAILED {case}: {' '.join(outcome.message.split())}")
        for result in wrong:
            _say("WRONG {}: {result}: error {error:.3g}, bound {bound:.3g}".format(case, **result))
        is_bad = outcome.status == "failed" or bool(wrong)
        num_results, num_failed = num_results + len(results), num_failed + is_bad
        row = rows[case.feature, case.dtype]
        ratios = [result["error"] / result["bound"] for result in results]
        row[case.block_size] = f"{max(ratios):7.2f}" if ratios else f"{'-':>7}"
        if len(row) == len(sizes):
            print(f"{case.feature:12}{case.dtype:10}", *map(row.get, sizes), sep="", flush=True)
    verdict = f"{num_failed} of {len(cases)} cases FAILED" if num_failed else "all within"
    print(f"{op}: {num_results} results, {verdict}")
    return not num_failed


def _say(failure: str) -> None:
    print(f"{_RED}{failure}{_PLAIN}" if sys.stdout.isatty() else failure, flush=True)


def _op_of(file: Path) -> str:
    """The op that a file defines.  OptionsError unless it is a Python file with one op."""
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "there is no such file"
        raise OptionsError(
            f"{file}: {what}; needs the file of an op, such as kernels/store_kvcache.py"
        )
    try:
        body = ast.parse(file.read_bytes(), str(file)).body
    except (SyntaxError, ValueError) as error:
        raise OptionsError(f"{file}: it is not Python: {error}") from error
    ops = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name in KERNELS]
    if len(ops) != 1:
        raise OptionsError(
            f"{file}: defines {', '.join(ops) or 'no op'}; needs a function for one of "
            f"{', '.join(KERNELS)}"
        )
    return ops[0]


def _run(case: _Case) -> list[dict[str, Any]]:
    """Run a case in a worker process.  Returns a row per result."""
    device = use_device().type
    _import_kernels(case.op, case.file)
    import torch

    from kernels.testing.cases import make_case

    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of the NaN that a wrong kernel reads
    feature, _, splits = case.feature.partition(" ")
    sizes: dict[str, Any] = {"features": () if feature == "none" else (feature,)}
    if splits:
        names = ["num_splits"] + ["num_prefix_splits"] * case.op.startswith("shared_prefix")
        sizes = _LENGTHS | {"options": dict.fromkeys(names, int(splits))}
    is_fp8 = case.dtype == "fp8"
    inputs = make_case(
        case.op,
        block_size=case.block_size,
        head_dim=80,
        dtype=torch.bfloat16 if is_fp8 else getattr(torch, case.dtype),
        kv_dtype=torch.float8_e4m3fn if is_fp8 else None,
        device=device,
        **sizes,
    )
    return [
        {"result": name, "error": one.error, "bound": one.bound, "passed": one.passed}
        for name, one in inputs.judge().items()
    ]


def _import_kernels(op: str, file: str) -> None:
    """Import ``kernels`` with ``file`` in place of the op's file."""
    if "kernels" in sys.modules:
        return

    def find_spec(name: str, _path: Any = None, _target: Any = None) -> Any:
        return spec_from_file_location(name, file) if name == f"kernels.{op}" else None

    sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))
    try:
        import kernels  # noqa: F401
    except (Exception, SystemExit) as error:
        raise _ImportFailed(f"{type(error).__name__}: {error}") from error
