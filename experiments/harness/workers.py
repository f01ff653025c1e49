"""Runs tasks in worker processes of this machine.

An executor is a function from tasks to a generator of their outcomes, in any order; it touches no
file, and closing the generator ends what still runs.  This one spawns its workers (a fork of a
process with torch's or numba's threads may hang) and gives each the tasks of one group after the
other, so that what they share is set up once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from experiments.harness.experiment import Unavailable
from experiments.harness.grid import Options
from experiments.harness.provenance import Code, imported_code

_TIME_TO_END = 10.0
"""Seconds that an idle process may take."""


@dataclass(frozen=True)
class Task:
    """A cell to run.  ``key`` comes back with its outcome."""

    key: str
    run_cell: Callable[[Any], list[dict[str, Any]]]
    cell: Options


@dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    key: str
    status: Literal["finished", "unavailable", "failed"]
    rows: list[dict[str, Any]]
    message: str
    """Why it is unavailable, or the last line of the error."""
    details: str
    """The traceback of a failure."""
    seconds: float
    code: Code = field(default_factory=dict)
    """What its result depends on besides the cell."""


Executor = Callable[[Sequence[Task]], Generator[Outcome]]


def execute(task: Task) -> Outcome:
    """Run one task here and catch what it raises."""
    started = time.perf_counter()
    rows, message, details = [], "", ""
    try:
        rows = _plain(task.run_cell(task.cell))
        status = "finished"
    except Unavailable as reason:
        status, message = "unavailable", str(reason)
    except Exception as error:
        status = "failed"
        message = f"{type(error).__name__}: {error}"
        details = traceback.format_exc()
    seconds = time.perf_counter() - started
    return Outcome(task.key, status, rows, message, details, seconds, imported_code())


def _plain(rows: Any) -> list[dict[str, Any]]:
    """``rows`` with NumPy scalars as Python numbers; TypeError for anything but rows of scalars."""
    rows = json.loads(json.dumps(rows, default=lambda value: value.item()))
    for row in rows:
        for column, value in row.items():
            if isinstance(value, (list, dict)):
                raise TypeError(f"column {column!r} of a row is not a scalar: {value!r}")
    return rows


def run_locally(tasks: Sequence[Task], *, jobs: int) -> Generator[Outcome]:
    """Run ``tasks`` in up to ``jobs`` processes, which end with the generator."""
    with Workers(min(jobs, len(tasks))) as workers:
        yield from workers(tasks)


class Workers:
    """An executor of ``jobs`` processes that go on from sweep to sweep, with all that is set up in
    them.

    deadline: when ``time.monotonic`` reaches it no task begins, and those that run are given up;
    they and the remaining tasks have no outcome.  limit_s: seconds after which a task is given up
    as failed: a kernel may never end.  A context manager, which ends the processes.
    """

    def __init__(
        self, jobs: int = 1, deadline: float = float("inf"), limit_s: float = float("inf")
    ) -> None:
        self.jobs, self.deadline, self.limit_s = jobs, deadline, limit_s
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the processes, which gives up what they hold; later tasks get fresh ones."""
        while self._workers:
            self._workers.pop().stop()

    def __call__(self, tasks: Sequence[Task]) -> Generator[Outcome]:
        if any(worker.task for worker in self._workers):
            self.end()  # a sweep was left while it ran
        waiting = _Waiting(tasks)
        self._give(waiting)
        while busy := [worker for worker in self._workers if worker.task]:
            limits = [worker.given_at + self.limit_s for worker in busy]
            until = min(self.deadline, *limits)
            timeout = None if until == float("inf") else max(0.0, until - time.monotonic())
            ready = wait([worker.connection for worker in busy], timeout)
            if not ready and time.monotonic() >= self.deadline:
                self.end()
            for worker, limit in zip(busy, limits, strict=True):
                if worker.connection in ready:
                    outcome = worker.take_outcome()
                elif self._workers and time.monotonic() >= limit:
                    outcome = worker.give_up(f"TimeoutError: no result after {self.limit_s:g} s")
                else:
                    continue
                if _is_spent(worker, outcome):
                    worker.stop()
                    self._workers.remove(worker)
                yield outcome
            self._give(waiting)

    def _give(self, waiting: _Waiting) -> None:
        """A task to each process that has none, as long as there are any."""
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, self.jobs))
        for number in range(self.jobs):
            if not waiting.groups or time.monotonic() >= self.deadline:
                return
            if number == len(self._workers):
                self._workers.append(_Worker(threads))
            if self._workers[number].task is None:
                self._workers[number].give(waiting.take(self._workers[number], self._workers))


def _is_spent(worker: _Worker, outcome: Outcome) -> bool:
    """Whether the process can run no further task: it is dead, or its CUDA context is, in which
    every call fails after one that went wrong on the device."""
    return not worker.alive or (outcome.status == "failed" and "CUDA" in outcome.message)


class _Waiting:
    """Tasks not yet given out, by group."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.groups: dict[tuple[str, ...], list[Task]] = {}
        for task in reversed(tasks):
            self.groups.setdefault(task.cell.group, []).append(task)

    def take(self, worker: _Worker, workers: list[_Worker]) -> Task:
        """The best next task of ``worker``: of its own group, else of the group that is most like
        its own and least like those of the others, else of the longest group."""
        others = [w.group for w in workers if w is not worker and w.group is not None]

        def fitness(group: tuple[str, ...]) -> tuple[int, ...]:
            untouched = group not in others
            like_own = _common(group, worker.group or ())
            like_others = max((_common(group, other) for other in others), default=0)
            rest = (like_own, -like_others) if untouched else (len(self.groups[group]), 0)
            return (group == worker.group, untouched, *rest)

        group = max(reversed(self.groups), key=fitness)
        task = self.groups[group].pop()
        if not self.groups[group]:
            del self.groups[group]
        return task


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """Length of the common beginning."""
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    )


class _Worker:
    """A process that runs the tasks sent to it, one at a time."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, threads))
        self.process.start()
        theirs.close()  # so that its death is seen as the end of the pipe
        self.task: Task | None = None
        self.group: tuple[str, ...] | None = None
        self.alive = True
        self.given_at = 0.0

    def give(self, task: Task) -> None:
        self.task, self.group = task, task.cell.group
        self.given_at = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # take_outcome sees it and tells
            self.connection.send_bytes(pickle.dumps(task))

    def take_outcome(self) -> Outcome:
        """The outcome of its task; a failure if the process has died."""
        try:
            outcome, self.task = self.connection.recv(), None
            return outcome
        except (EOFError, ConnectionResetError):
            self.process.join()
            return self.give_up(f"its worker process died with exit code {self.process.exitcode}")

    def give_up(self, message: str) -> Outcome:
        """The failure of its task, after which the process serves no other."""
        task, self.task, self.alive = self.task, None, False
        seconds = time.monotonic() - self.given_at
        return Outcome(task.key, "failed", [], message, "", seconds)

    def stop(self) -> None:
        """End it: at once while it has a task, else when it has given back what it holds."""
        self.connection.close()  # the end of what an idle process reads
        if self.alive and self.task is None:
            self.process.join(_TIME_TO_END)
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the sweep's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # PyTorch takes the largest that is set, so one that the user sets has to be that of all.
    limit = os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    for variable in ("MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(variable, limit)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send(execute(pickle.loads(message)))


def _end_with_parent() -> None:
    """A killed sweep must not leave workers that compute for nobody."""
    multiprocessing.parent_process().join()
    os._exit(1)
