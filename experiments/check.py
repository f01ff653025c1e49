"""``pagelab check``: compare the kernel of a file with fp64, in processes that it may crash."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import spec_from_file_location
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

from experiments.bench.shapes import use_device
from experiments.harness import OptionsError
from experiments.harness.workers import Task, run_locally
from experiments.kernel_accuracy import FEATURES, KERNELS, KernelAccuracy, cells, run_cell

_SPLITS = (1, 2, 3, 7, 64)
"""Values of ``num_splits``.  64 are more chunks than the tokens of a case fill."""
_LENGTHS = {"context_lens": (1, 37, 430), "query_lens": (1, 9, 4)}
"""Lengths in the cases with splits: 7 chunks in Triton's interpreter and of GPU tiles of 64."""


@dataclass(frozen=True, kw_only=True)
class _Check(KernelAccuracy):
    file: str
    """File of the op."""
    num_splits: int | None = None
    layout: str = "NHD"
    """Of the caches, see ``kernels.testing.inputs``.  If "unlike", rows of tables lie apart."""

    def case(self, device: str, **sizes: Any) -> Any:
        if self.num_splits:
            names = ["num_splits"] + ["num_prefix_splits"] * self.kernel.startswith("shared_prefix")
            sizes |= _LENGTHS | {"options": dict.fromkeys(names, self.num_splits)}
        made = super().case(device, layout=self.layout, **sizes)
        for name, tensor in made.inputs.items():
            if self.layout == "unlike" and name.endswith("block_tables"):
                made.inputs[name] = tensor.repeat(1, 2)[:, : tensor.shape[1]]
        return made

    @property
    def label(self) -> str:
        return f"splits {self.num_splits}" if self.num_splits else self.feature

    def __str__(self) -> str:
        blocks = f", block size {self.block_size}, layout {self.layout}"
        return f"{self.label}, {self.dtype}" + blocks * KERNELS[self.kernel].has_blocks


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
    axes: dict[str, Any] = {"kernel": (op,), "dtype": dtypes, "block_size": block_sizes}
    axes["head_dim"] = (80,)
    features = [feature for feature in FEATURES if feature != "split"]
    grids = [_Check(**axes, feature=features, file=str(file))]
    grids += [_Check(**axes, feature=("split",), num_splits=n, file=str(file)) for n in _SPLITS]
    cases: list[Any] = [case for grid in grids for case in cells(grid)]
    cases.sort(key=lambda case: (case.num_splits or 0, FEATURES.index(case.feature), case.dtype))
    cases[::2] = [replace(case, layout="unlike") for case in cases[::2]]
    sizes = list(dict.fromkeys(case.block_size for case in cases))
    print(f"{op}: largest error / bound of {len(cases)} cases")
    if KERNELS[op].has_blocks:
        print(f"{'block size':22}" + "".join(f"{size:9}" for size in sizes), flush=True)
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
        num_results += len(results)
        num_failed += outcome.status == "failed" or bool(wrong)
        row = rows[case.label, case.dtype]
        ratios = [result["error"] / result["bound"] for result in results]
        row[case.block_size] = f" {max(ratios):8.3g}" if ratios else f"{'-':>9}"
        if len(row) == len(sizes):
            print(f"{case.label:12}{case.dtype:10}", *map(row.get, sizes), sep="", flush=True)
    verdict = f"{num_failed} of {len(cases)} cases FAILED" if num_failed else "all within"
    print(f"{op}: {num_results} results, {verdict}")
    return not num_failed


def _say(failure: str) -> None:
    """Print a line, in red on a terminal."""
    print(f"\033[31m{failure}\033[0m" if sys.stdout.isatty() else failure, flush=True)


def _op_of(file: Path) -> str:
    """The op that a file defines.  OptionsError unless it is a Python file with one op."""
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "there is no such file"
        needs = "needs the file of an op, such as kernels/store_kvcache.py"
        raise OptionsError(f"{file}: {what}; {needs}")
    try:
        body = ast.parse(file.read_bytes(), str(file)).body
    except (SyntaxError, ValueError) as error:
        raise OptionsError(f"{file}: is not Python: {error}") from error
    ops = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name in KERNELS]
    if len(ops) != 1:
        names = ", ".join(KERNELS)
        raise OptionsError(f"{file}: defines {', '.join(ops) or 'no op'}; needs one of {names}")
    return ops[0]


def _run(case: _Check) -> list[dict[str, Any]]:
    """Run a case in a worker process, with ``file`` in place of the op's file."""
    use_device()
    if "kernels" not in sys.modules:

        def find_spec(name: str, _path: Any = None, _target: Any = None) -> Any:
            is_op = name == f"kernels.{case.kernel}"
            return spec_from_file_location(name, case.file) if is_op else None

        sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))
        warnings.simplefilter("ignore", RuntimeWarning)  # of NaN that a wrong kernel reads
        try:
            import kernels  # noqa: F401
        except (Exception, SystemExit) as error:
            raise _ImportFailed(f"{type(error).__name__}: {error}") from error
    slow = Timer(30, print, [f"{case}: still running after 30 s"], {"flush": True})
    slow.start()
    try:
        return run_cell(case)
    finally:
        slow.cancel()
