"""Runs tasks in worker processes of this machine.

An executor is a function from tasks to a generator of their outcomes, in any order.  It touches no
file, and closing the generator ends the tasks that still run.  This one spawns its workers (a fork
of a process with threads of torch or numba may hang) and gives each worker the tasks of one group
after the other, so that shared data are set up once.
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
"""Seconds an idle process may take to end before it is killed."""


@dataclass(frozen=True)
class Task:
    """A cell to run.  ``key`` comes back with its outcome."""

    key: str
    run_cell: Callable[[Any], list[dict[str, Any]]]
    cell: Options


@dataclass(frozen=True)
class Outcome:
    """The result of a task."""

    key: str
    status: Literal["finished", "unavailable", "failed"]
    rows: list[dict[str, Any]]
    message: str
    """Why it is unavailable, or the last line of the error."""
    details: str
    """The traceback of a failure."""
    seconds: float
    code: Code = field(default_factory=dict)
    """The code that the result depends on."""


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
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, jobs))
    waiting, workers = _Waiting(tasks), []
    try:
        while waiting.groups or any(worker.task for worker in workers):
            while waiting.groups and len(workers) < jobs:
                workers.append(_Worker(threads))
            for worker in workers:
                if worker.task is None and waiting.groups:
                    others = [w.group for w in workers if w is not worker and w.group is not None]
                    worker.give(waiting.take(worker.group or (), others))
            busy = {worker.connection: worker for worker in workers if worker.task}
            for connection in wait(list(busy)):
                worker = busy[connection]
                outcome = worker.take_outcome()
                if _is_spent(worker, outcome):
                    worker.stop()
                    workers.remove(worker)
                yield outcome
    finally:
        for worker in workers:
            worker.stop()


def _is_spent(worker: _Worker, outcome: Outcome) -> bool:
    """Whether the process can run no further task: it is dead, or its CUDA context is.

    After an error on the device every later CUDA call of the process fails.
    """
    return not worker.alive or (outcome.status == "failed" and "CUDA" in outcome.message)


class _Waiting:
    """Tasks not yet given out, by group."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.groups: dict[tuple[str, ...], list[Task]] = {}
        for task in reversed(tasks):
            self.groups.setdefault(task.cell.group, []).append(task)

    def take(self, own: tuple[str, ...], others: list[tuple[str, ...]]) -> Task:
        """The best next task of a worker whose last group is ``own``.

        From its own group, else from the group most like its own and least like the ``others``
        of other workers, else from the longest group.
        """

        def fitness(group: tuple[str, ...]) -> tuple[int, ...]:
            untouched = group not in others
            like_own = _common(group, own)
            like_others = max((_common(group, other) for other in others), default=0)
            rest = (like_own, -like_others) if untouched else (len(self.groups[group]), 0)
            return (group == own, untouched, *rest)

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
        theirs.close()  # so that the worker's death closes the pipe
        self.task: Task | None = None
        self.group: tuple[str, ...] | None = None
        self.alive = True
        self.given_at = 0.0

    def give(self, task: Task) -> None:
        self.task, self.group = task, task.cell.group
        self.given_at = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # take_outcome reports it
            self.connection.send_bytes(pickle.dumps(task))

    def take_outcome(self) -> Outcome:
        """The outcome of its task; a failure if the process has died."""
        try:
            outcome = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.alive = False
            message = f"its worker process died with exit code {self.process.exitcode}"
            seconds = time.monotonic() - self.given_at
            outcome = Outcome(self.task.key, "failed", [], message, "", seconds)
        self.task = None
        return outcome

    def stop(self) -> None:
        """End the process: at once if it has a task, else after it has released its resources."""
        self.connection.close()  # an idle process reads the end of the pipe
        if self.alive and self.task is None:
            self.process.join(_TIME_TO_END)
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # PyTorch takes the largest of these, so a value that the user sets must count for all.
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
    """Exit when the sweep is gone, so that a killed sweep leaves no worker running."""
    multiprocessing.parent_process().join()
    os._exit(1)
