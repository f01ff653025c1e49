"""Runs tasks in worker processes of this machine.

An executor is a function from tasks to a generator of their outcomes, in any order.  It writes no
file.  Closing the generator ends the running tasks.  Each worker here is a pool of one process, so
if a process dies, only its task fails.  Processes are spawned, because a forked process may hang if
torch or numba had started threads.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from experiments.harness.experiment import Unavailable
from experiments.harness.grid import Options
from experiments.harness.provenance import Code, imported_code


@dataclass(frozen=True)
class Task:
    """A cell to run.  The task's outcome has the same ``key``."""

    key: str
    run_cell: Callable[[Any], list[dict[str, Any]]]
    cell: Options


@dataclass
class Outcome:
    """The result of a task."""

    key: str
    status: Literal["finished", "unavailable", "failed"] = "finished"
    message: str = ""
    """The reason why the cell is unavailable, or the error."""
    details: str = ""
    """The traceback of a failure."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    code: Code = field(default_factory=dict)
    """The code that the result depends on."""


_WORTH_A_SETUP = 6
"""Number of tasks that justify setting up their shared data once more."""

Executor = Callable[[Sequence[Task]], Generator[Outcome]]


def execute(task: Task) -> Outcome:
    """Run one task here and catch its errors."""
    started, outcome = time.perf_counter(), Outcome(task.key)
    try:
        outcome.rows = _plain(task.run_cell(task.cell))
    except Unavailable as reason:
        outcome.status, outcome.message = "unavailable", str(reason)
    except Exception as error:
        outcome.status, outcome.message = "failed", f"{type(error).__name__}: {error}"
        outcome.details = traceback.format_exc()
    outcome.seconds = time.perf_counter() - started
    outcome.code = imported_code()
    return outcome


def _plain(rows: Any) -> list[dict[str, Any]]:
    """Convert NumPy scalars in ``rows`` to Python numbers.  Raises TypeError for other values."""
    rows = json.loads(json.dumps(rows, default=lambda value: value.item()))
    for row in rows:
        for column, value in row.items():
            if isinstance(value, (list, dict)):
                raise TypeError(f"column {column!r} of a row is not a scalar: {value!r}")
    return rows


def run_here(tasks: Sequence[Task]) -> Generator[Outcome]:
    """Run ``tasks`` in this process, one by one."""
    yield from map(execute, tasks)


def run_locally(tasks: Sequence[Task], *, jobs: int) -> Generator[Outcome]:
    """Run ``tasks`` in up to ``jobs`` processes.  The processes end when the generator ends.

    A process runs the tasks with one ``setup_key`` in succession, so their data are set up once.  A
    second process takes some of them only while at least ``_WORTH_A_SETUP`` wait.
    """
    jobs = max(1, min(jobs, len(tasks)))
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    spawn = multiprocessing.get_context("spawn")
    new_pool = partial(ProcessPoolExecutor, 1, spawn, set_up, (threads,))
    waiting: dict[tuple[str, ...], deque[Task]] = {}
    for task in tasks:
        waiting.setdefault(task.cell.setup_key, deque()).append(task)
    pools = [new_pool() for _ in range(jobs)]
    setups: list[tuple[str, ...]] = [()] * jobs
    running: dict[Future[Outcome], tuple[int, Task]] = {}
    idle = [*range(jobs)]
    try:
        while waiting or running:
            while waiting and idle:
                worker = idle.pop()
                if (setup := _next_setup(waiting, setups[worker], setups)) is None:
                    continue  # it is not needed any more
                setups[worker] = setup
                task = waiting[setup].popleft()
                if not waiting[setup]:
                    del waiting[setup]
                # A new process inherits the mask: it may not be interrupted while it imports.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    running[pools[worker].submit(execute, task)] = (worker, task)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                worker, task = running.pop(future)
                try:
                    outcome = future.result()
                    # After a device error, every later CUDA call of this process fails.
                    is_spent = outcome.status == "failed" and "CUDA" in outcome.message
                except BrokenProcessPool:
                    outcome = Outcome(task.key, "failed", "its worker process died")
                    is_spent = True
                if is_spent:
                    pools[worker].shutdown()
                    pools[worker] = new_pool()
                idle.append(worker)
                yield outcome
    finally:
        if running:
            for process in multiprocessing.active_children():
                process.kill()
        for pool in pools:
            pool.shutdown()


def _next_setup(
    waiting: dict[tuple[str, ...], deque[Task]], own: tuple[str, ...], taken: list[tuple[str, ...]]
) -> tuple[str, ...] | None:
    """The worker's own setup key, else the first without a worker, else the one of most tasks.

    None if it has fewer than ``_WORTH_A_SETUP``: its worker runs them."""
    if own in waiting:
        return own
    longest = max(waiting, key=lambda setup: len(waiting[setup]))
    is_short = longest and len(waiting[longest]) < _WORTH_A_SETUP
    return next((setup for setup in waiting if setup not in taken), None if is_short else longest)


def set_up(threads: int) -> None:
    """Prepare a worker process, which ends with its parent."""
    gc.set_threshold(50_000, 20, 100)  # imported packages make a million objects that stay
    end_with_parent(partial(os._exit, 1))
    # PyTorch uses the largest of these variables, so the user's value must apply to all of them.
    limit = os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    for variable in ("MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(variable, limit)


def end_with_parent(end: Callable[[], object]) -> None:
    """Call ``end`` when the parent process ends: a killed sweep leaves no worker running."""

    def wait_and_end() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            end()

    threading.Thread(target=wait_and_end, daemon=True).start()
