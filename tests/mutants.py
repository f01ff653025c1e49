"""Mutation testing: break a package in many small ways and count the breaks its tests notice.

    python tests/mutants.py cache --sample 300 --seed 0 [--repo DIR] [--jobs 2] [--out FILE.csv]

A mutant is a copy of the checkout with one change: another comparison, operator or number, a
condition negated, max for min, None returned, a call or an assignment dropped.  Strings,
annotations, decorators, what `raise` raises, TYPE_CHECKING blocks, __all__ and __repr__ stay as
they are.  The sample is uniform over all places that can be changed.

Two passes over tests/PACKAGE come first.  One shows that the tests pass and takes their times; the
other traces the lines that each of them runs, if it takes no more than 20 seconds.  A mutant then
meets the tests that run the changed statement, quickest first, until one fails.  Defaults of
parameters stand for their whole function and class attributes for their class, since both run at
import.  Where no test is seen to run the place (the trace sees neither code compiled by numba nor
other processes), the mutant meets all tests in the files of those that run its module, or all tests
if none does.  Of these it meets as many as take 60 seconds together.  A mutant that needs five
times as long as its tests should, and 20 seconds at least, counts as killed; all times are CPU
times, so that other busy processes kill none.  Tests run without a GPU and with the same random
numbers each time, in children of a process that has loaded the libraries but not the package.

FILE gets a row for each mutant as soon as it is judged; a run that was stopped goes on from there.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import csv
import gc
import importlib
import io
import itertools
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HYPOTHESIS_PROFILE": "ci",  # the same examples each time, and no shrinking
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTEST_ADDOPTS": "",
    "PYTHONHASHSEED": "0",
    "TRITON_INTERPRET": "1",
}
LIBRARIES = ("hypothesis", "numba", "numpy", "torch", "transformers", "triton", "triton.language")
TRACED_SECONDS = 20  # of one test, at most
TESTED_SECONDS = 60  # of the tests that one mutant meets, at most
GIGABYTE = 2**30
COLUMNS = ("file", "line", "mutation", "index", "status", "killing test", "seconds")

SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
NEGATED_BY_SWAP = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """One change of a file: the index-th.  Who runs a line of ``first`` to ``last`` runs it."""

    file: str
    index: int
    line: int
    change: str
    first: int
    last: int

    def row(self) -> list[str]:
        return [self.file, str(self.line), self.change, str(self.index)]


class Job(NamedTuple):
    """Tests, or files of tests, to run in a checkout changed at ``place``, or traced."""

    tests: list[str]
    place: Place | None = None
    traced: str | None = None  # the package whose lines count
    cpu_seconds: int = 1800


def replacements(node: ast.AST, parent: ast.AST, field: str):
    """(what the change says, new node) for each node that can stand for ``node``."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], SWAPS[type(op)](), *node.ops[i + 1 :]]
            new = ast.Compare(node.left, ops, node.comparators)
            yield f"{ast.unparse(node)} -> {ast.unparse(new)}", new
    elif type(getattr(node, "op", None)) in SWAPS:  # BinOp, BoolOp or AugAssign
        new = copy.copy(node)
        new.op = SWAPS[type(node.op)]()
        yield f"{ast.unparse(node)} -> {ast.unparse(new)}", new
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} -> {value}", ast.Constant(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"{ast.unparse(node)} -> {ast.unparse(node.operand)}", node.operand
    elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("min", "max"):
        other = ast.Name("max" if node.func.id == "min" else "min")
        yield f"{node.func.id} -> {other.id}", ast.Call(other, node.args, node.keywords)
    elif isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
        yield f"{ast.unparse(node)} -> return None", ast.Return(ast.Constant(None))

    if isinstance(parent, ast.If | ast.While | ast.IfExp) and field == "test":
        negated_already = isinstance(node, ast.UnaryOp | ast.Constant) or (
            isinstance(node, ast.Compare) and isinstance(node.ops[0], NEGATED_BY_SWAP)
        )
        if not negated_already:
            yield f"{ast.unparse(node)} -> not", ast.UnaryOp(ast.Not(), node)
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_assignment = isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value
    if is_call or is_assignment:
        yield f"{ast.unparse(node)} -> pass", ast.Pass()


def stays(node: ast.AST, field: str) -> bool:
    """Whether the docstring above has ``node``, in this field of its parent, stay as it is."""
    return (
        field in ("annotation", "returns", "decorator_list", "msg")
        or isinstance(node, ast.Raise | ast.JoinedStr)
        or (isinstance(node, FUNCTION) and node.name in ("__repr__", "__str__"))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__")
    )


def changes(node: ast.AST, in_function: bool = False, span: tuple[int, int] = (1, 99_999)):
    """(line, change, span) of each change below ``node``, in force until the next one is taken."""
    for field, value in ast.iter_fields(node):
        siblings = value if isinstance(value, list) else [value]
        inside = in_function or (isinstance(node, FUNCTION) and field == "body")
        for i, child in enumerate(siblings):
            if not isinstance(child, ast.AST) or stays(child, field):
                continue
            here = span
            if isinstance(child, ast.stmt) and inside:
                body = getattr(child, "body", None)
                header = max(child.lineno, body[0].lineno - 1) if body else child.end_lineno
                here = child.lineno, header
            elif isinstance(child, FUNCTION | ast.ClassDef):
                here = child.lineno, child.end_lineno
            for change, new in replacements(child, node, field):
                for one in (new, child):
                    if isinstance(value, list):
                        value[i] = one
                    else:
                        setattr(node, field, one)
                    if one is new:
                        yield child.lineno, " ".join(change.split()), here
            yield from changes(child, inside, here)


def places_of(repo: Path, package: str) -> list[Place]:
    return [
        Place(str(path.relative_to(repo)), i, line, change, *span)
        for path in sorted((repo / package).rglob("*.py"))
        for i, (line, change, span) in enumerate(changes(ast.parse(path.read_text())))
    ]


def changed_source(source: str, index: int) -> str:
    tree = ast.parse(source)
    next(itertools.islice(running := changes(tree), index, None))
    text = ast.unparse(tree)
    running.close()
    return text


class Outcome:
    """A plugin of pytest: runs the wanted tests in order; keeps their times and traced lines."""

    def __init__(self, job: Job, root: Path) -> None:
        self.failed = ""
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, set[tuple[str, int]]] = {}
        self._rank = {test: i for i, test in enumerate(job.tests) if "::" in test}
        self._root, self._package = root, f"{root}/{job.traced}/"
        self._trace = self._enter if job.traced else None
        self._run: set[tuple[str, int]] = set()
        self._run_by_fixture = collections.defaultdict(set)  # by one that several tests share

    def pytest_collection_modifyitems(self, items) -> None:
        if self._rank:
            items[:] = [item for item in items if item.nodeid in self._rank]
            items.sort(key=lambda item: self._rank[item.nodeid])

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    pytest_collectreport = pytest_runtest_logreport

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._run = set()
        started = cpu_seconds()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        result = yield
        sys.settrace(None)
        threading.settrace(None)
        self.seconds[item.nodeid] = cpu_seconds() - started
        fixtures = [self._run_by_fixture[name] for name in getattr(item, "fixturenames", ())]
        lines = self._run.union(*fixtures)
        self.lines[item.nodeid] = {(os.path.relpath(file, self._root), n) for file, n in lines}
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before, self._run = self._run, set()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._run_by_fixture[fixturedef.argname] |= self._run
            self._run |= before

    def _enter(self, frame, _event, _arg):
        return self._line if frame.f_code.co_filename.startswith(self._package) else None

    def _line(self, frame, event, _arg):
        if event == "line":
            self._run.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def cpu_seconds() -> float:
    usage = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in usage)


def run_tests(job: Job, root: Path, home: Path) -> None:
    """Change ``root`` as the job says, run its tests and leave what they show in ``home``."""
    os.setsid()
    home.mkdir()
    log = os.open(home / "log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(root)
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, job.cpu_seconds),
        (resource.RLIMIT_DATA, 8 * GIGABYTE),
        (resource.RLIMIT_FSIZE, GIGABYTE),
    ):
        resource.setrlimit(limit, (value, value))
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={home}/tmp"]
    sys.dont_write_bytecode = bool(job.place)
    if job.place:
        options.append("--exitfirst")
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        source = Path(job.place.file).read_text()
        Path(job.place.file).write_text(changed_source(source, job.place.index))
    outcome = Outcome(job, root)
    files = dict.fromkeys(test.partition("::")[0] for test in job.tests)
    code = pytest.main([*options, *files], plugins=[outcome])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        outcome.failed = outcome.failed or str(code)
    result = outcome.failed, outcome.seconds, outcome.lines
    (home / "outcome").write_bytes(pickle.dumps(result))


def run_all(jobs: list[Job], roots: list[Path], repo: Path):
    """Run each job in the next free root: (job, failed test, seconds, lines) as they end.

    A job may take ten times as long as it may compute.
    """
    waiting, free, running = collections.deque(jobs), list(roots), {}
    while waiting or running:
        while waiting and free:
            job, root = waiting.popleft(), free.pop()
            pid = os.fork()
            if not pid:
                with contextlib.suppress(BaseException):
                    run_tests(job, root, root.parent / f"run_{os.getpid()}")
                os._exit(0)
            running[pid] = job, root, time.monotonic() + 10 * job.cpu_seconds
        time.sleep(0.01)
        for pid, (job, root, deadline) in list(running.items()):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                continue
            del running[pid]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what the tests have left running
            if job.place:
                shutil.copy2(repo / job.place.file, root / job.place.file)
            free.append(root)
            home = root.parent / f"run_{pid}"
            written = home / "outcome"
            no_end = "(crash or time limit)", {}, {}
            yield job, *(pickle.loads(written.read_bytes()) if written.exists() else no_end)
            shutil.rmtree(home, ignore_errors=True)


def measure(repo: Path, package: str, roots: list[Path]):
    """(CPU seconds of each test, the tests that run each line of the package)."""
    paths = sorted((repo / "tests" / package).rglob("test_*.py"))
    files = [str(path.relative_to(repo)) for path in paths]
    seconds: dict[str, float] = {}
    for _, failed, times, _ in run_all([Job([file]) for file in files], roots, repo):
        if failed:
            raise SystemExit(f"without any change, this fails: {failed}")
        seconds |= {test: time for test, time in times.items() if time <= TRACED_SECONDS}
    jobs = []
    for file in files:
        tests = [test for test in seconds if test.startswith(f"{file}::")]
        jobs.append(Job(sorted(tests, key=seconds.get), traced=package))
    jobs.sort(key=lambda job: -sum(map(seconds.get, job.tests)))
    tests_of = collections.defaultdict(set)
    for _, failed, _, lines in run_all(jobs, roots, repo):
        if failed:
            print(f"when traced, this fails: {failed}")
        for test, its_lines in lines.items():
            for line in its_lines:
                tests_of[line].add(test)
    return seconds, tests_of


def job_of(place: Place, seconds: dict[str, float], tests_of) -> tuple[Job, bool]:
    """The tests that a mutant meets, and whether any was seen to run the place."""
    span = range(place.first, place.last + 1)
    tests = set().union(*(tests_of.get((place.file, line), ()) for line in span))
    seen = bool(tests)
    if not seen:
        users = set().union(*(tests_of[at] for at in tests_of if at[0] == place.file))
        files = {test.partition("::")[0] for test in users}
        tests = [test for test in seconds if test.partition("::")[0] in files] or seconds
    tests = sorted(tests, key=seconds.get)
    totals = list(itertools.accumulate(map(seconds.get, tests)))
    count = max(1, sum(total <= TESTED_SECONDS for total in totals))
    limit = 10 + min(120, max(20, 5 * totals[count - 1]))  # 10: to collect the tests
    return Job(tests[:count], place, cpu_seconds=int(limit)), seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package")
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repo", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not ENVIRONMENT.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})

    started = time.monotonic()
    sys.path.pop(0)  # tests/, whose folders have the names of packages
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-p", "no:cacheprovider", "--rootdir", empty, empty])  # loads the plugins
    gc.freeze()
    repo = args.repo.resolve()
    places = places_of(repo, args.package)
    sample = random.Random(args.seed).sample(places, min(args.sample, len(places)))
    rows = []
    if args.out and args.out.exists():
        with args.out.open(newline="") as judged_before:
            rows = list(csv.reader(judged_before))[1:]
    judged = [row[:4] for row in rows]
    if any(row not in map(Place.row, sample) for row in judged):
        raise SystemExit(f"{args.out} has mutants of another sample")
    left = [place for place in sample if place.row() not in judged]
    with tempfile.TemporaryDirectory(prefix="mutants_") as scratch:
        roots = [Path(scratch, str(i)) for i in range(args.jobs)]
        shutil.copytree(repo, roots[0], ignore=shutil.ignore_patterns(".*", "__pycache__"))
        seconds, tests_of = measure(repo, args.package, args.jobs * roots[:1])
        for root in roots[1:]:
            shutil.copytree(roots[0], root)  # with the bytecode
        total = f"{len(seconds)} tests of {sum(seconds.values()):.0f} s"
        print(f"{len(places)} places, {total}, measured in {time.monotonic() - started:.0f} s")
        chosen = [job_of(place, seconds, tests_of) for place in left]
        unseen = {job.place for job, seen in chosen if not seen}
        for job, failed, times, _ in run_all([job for job, _ in chosen], roots, repo):
            place, spent = job.place, f"{sum(times.values()):.2f}"
            status = "killed" if failed else "unseen" if place in unseen else "survived"
            rows.append([*place.row(), status, failed, spent])
            print(f"{len(rows)}/{len(sample)} {status}", *place.row()[:3], flush=True)
            if args.out:
                with args.out.open("w", newline="") as out:
                    csv.writer(out).writerows([COLUMNS, *rows])
    print(f"\n{'':44} killed  total    rate")
    for name in [*sorted({row[0] for row in rows}), "all"]:
        statuses = [row[4] for row in rows if name in (row[0], "all")]
        killed, total = statuses.count("killed"), len(statuses)
        print(f"{name:44} {killed:6} {total:6} {killed / total:7.1%}")
    print(f"{sum(row[4] == 'unseen' for row in rows)} survivors where no test was seen to run")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
