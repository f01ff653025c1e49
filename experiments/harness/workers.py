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
    jobs = min(jobs, len(tasks))
    threads = max(1, len(os.sched_getaffinity(0)) // jobs) if jobs else 1
    waiting = _Waiting(tasks)
    workers: list[_Worker] = []
    try:
        workers.extend(_Worker(threads) for _ in range(jobs))
        for worker in workers:
            worker.give(waiting.take(worker, workers))
        while busy := {w.connection: w for w in workers if w.task is not None}:
            for connection in wait(list(busy)):
                worker = busy[connection]
                outcome = worker.take_outcome()
                yield outcome
                if _is_spent(worker, outcome):
                    worker.stop()
                    workers.remove(worker)
                    worker = _Worker(threads)
                    workers.append(worker)
                worker.give(waiting.take(worker, workers))
    finally:
        for worker in workers:
            worker.stop()


class LastingWorker:
    """An executor of one process that goes on from sweep to sweep, with all that is set up in it.

    deadline: when ``time.monotonic`` reaches it no task begins, and one that runs is given up; the
    remaining tasks have no outcome.  limit_s: seconds after which a task is given up as failed: a
    kernel may never end.  A context manager, which ends the process.
    """

    def __init__(self, deadline: float = float("inf"), limit_s: float = float("inf")) -> None:
        self.deadline, self.limit_s = deadline, limit_s
        self._worker: _Worker | None = None

    def __enter__(self) -> LastingWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process, which gives up what it holds; the next task gets a fresh one."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def __call__(self, tasks: Sequence[Task]) -> Generator[Outcome]:
        if self._worker is not None and self._worker.task is not None:
            self.end()  # a sweep was left while it ran
        for task in tasks:
            remaining = self.deadline - time.monotonic()
            if remaining <= 0:
                return
            if self._worker is None:
                self._worker = _Worker(len(os.sched_getaffinity(0)))
            worker = self._worker
            worker.give(task)
            timeout = min(remaining, self.limit_s)
            if not worker.connection.poll(None if timeout == float("inf") else timeout):
                self.end()
                if remaining <= self.limit_s:
                    return
                message = f"TimeoutError: no result after {timeout:g} s"
                yield Outcome(task.key, "failed", [], message, "", timeout)
                continue
            outcome = worker.take_outcome()
            if _is_spent(worker, outcome):
                self.end()
            yield outcome


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

    def take(self, worker: _Worker, workers: list[_Worker]) -> Task | None:
        """The best next task of ``worker``: of its own group, else the group that is most like
        its own and least like those of the others, else one of the longest group."""
        if not self.groups:
            return None
        others = [w.group for w in workers if w is not worker and w.group is not None]
        untouched = [group for group in reversed(self.groups) if group not in others]

        def fitness(group: tuple[str, ...]) -> tuple[int, int]:
            return (
                _common(group, worker.group or ()),
                -max((_common(group, other) for other in others), default=0),
            )

        if worker.group in self.groups:
            group = worker.group
        elif untouched:
            group = max(untouched, key=fitness)
        else:
            group = max(self.groups, key=lambda group: len(self.groups[group]))
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
        self._given_at = 0.0

    def give(self, task: Task | None) -> None:
        self.task = task
        if task is not None:
            self.group = task.cell.group
            self._given_at = time.perf_counter()
            with contextlib.suppress(BrokenPipeError):  # take_outcome sees it and tells
                self.connection.send_bytes(pickle.dumps(task))

    def take_outcome(self) -> Outcome:
        """The outcome of its task; a failure if the process has died."""
        task, self.task = self.task, None
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.alive = False
            message = f"its worker process died with exit code {self.process.exitcode}"
            seconds = time.perf_counter() - self._given_at
            return Outcome(task.key, "failed", [], message, "", seconds)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


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
