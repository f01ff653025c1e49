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
from experiments.kernel_accuracy import KernelAccuracy, cells, ops, run_cell

_KERNELS = Path(__file__).parent.with_name("kernels") / "__init__.py"
_FEATURES: tuple[str, ...] = ()
"""Options of the op that are checked.  Empty: every one."""
_SPLITS = (1, 2, 3, 7, 64)
"""Values of ``num_splits``.  64 are more chunks than the tokens of a case fill."""
_LENGTHS = {"context_lens": (1, 37, 430), "query_lens": (1, 9, 4)}
"""Lengths in the cases with splits: 7 chunks in Triton's interpreter and of GPU tiles of 64."""


@dataclass(frozen=True, kw_only=True)
class _Check(KernelAccuracy):
    file: str
    """File of the op."""
    has_blocks: bool = True
    """Whether the block size matters to the op."""
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
        return f"{self.label}, {self.dtype}" + blocks * self.has_blocks


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
    axes: dict[str, Any] = {"kernel": (op,), "dtype": (*dtypes,), "block_size": (*block_sizes,)}
    grid = _Check(**axes, head_dim=(80,), feature=_FEATURES, file=str(file))
    (found,) = run_locally([Task(op, _cells, grid)], jobs=1)
    if found.status == "failed":
        raise OptionsError(f"{file}: importing it failed: {found.message}")
    cases: list[Any] = [
        replace(grid, kernel=op, head_dim=80, seed=0, num_splits=number, **row)
        for row in found.rows
        for number in (_SPLITS if row["feature"] == "split" else (None,))
    ]
    order = [case.feature for case in cases].index
    cases.sort(key=lambda case: (case.num_splits or 0, order(case.feature), case.dtype))
    cases[::2] = [replace(case, layout="unlike") for case in cases[::2]]
    sizes = list(dict.fromkeys(case.block_size for case in cases))
    print(f"{op}: largest error / bound of {len(cases)} cases")
    if cases[0].has_blocks:
        print(f"{'block size':22}" + "".join(f"{size:9}" for size in sizes), flush=True)
    tasks = [Task(str(number), _run, case) for number, case in enumerate(cases)]
    rows, num_results, num_failed = defaultdict[tuple, dict[int, str]](dict), 0, 0
    for outcome in run_locally(tasks, jobs=min(len(dtypes), len(os.sched_getaffinity(0)))):
        case, results = cases[int(outcome.key)], outcome.rows
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
    known = _names()
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    ops = [name for name in defined if name in known]
    if len(ops) != 1:
        names = ", ".join(known)
        raise OptionsError(f"{file}: defines {', '.join(ops) or 'no op'}; needs one of {names}")
    return ops[0]


def _names() -> list[str]:
    """Names of the ops, from the text of ``kernels``: importing it may end the process."""
    found = [node for node in ast.parse(_KERNELS.read_bytes()).body if isinstance(node, ast.Assign)]
    (names,) = [node.value for node in found if ast.unparse(node.targets[0]) == "__all__"]
    return ast.literal_eval(names)


def _cells(grid: _Check) -> list[dict[str, Any]]:
    """Columns of the cells of a grid, in a worker process."""
    _import_kernels(grid.file, *grid.kernel)
    has_blocks = ops()[grid.kernel[0]].has_blocks
    names = ("feature", "dtype", "block_size")
    return [{**cell.columns(*names), "has_blocks": has_blocks} for cell in cells(grid)]


def _import_kernels(file: str, op: str) -> None:
    """Import kernels with ``file`` in place of the op's file."""
    use_device()
    if "kernels" in sys.modules:
        return

    def find(name: str, _path: Any = None, _target: Any = None) -> Any:
        return spec_from_file_location(name, file) if name == f"kernels.{op}" else None

    sys.meta_path.insert(0, SimpleNamespace(find_spec=find))
    warnings.simplefilter("ignore", RuntimeWarning)  # of NaN that a wrong kernel reads
    try:
        import kernels  # noqa: F401
    except SystemExit as error:  # which would end the parent, too
        raise ImportError(f"SystemExit: {error}") from error


def _run(case: _Check) -> list[dict[str, Any]]:
    """Run a case in a worker process."""
    _import_kernels(case.file, case.kernel)
    slow = Timer(30, print, [f"{case}: still running after 30 s"], {"flush": True})
    slow.start()
    try:
        return run_cell(case)
    finally:
        slow.cancel()
