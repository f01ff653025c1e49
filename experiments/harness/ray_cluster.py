"""Runs tasks on the machines of a Ray cluster.

The checkout becomes the working directory of the workers.  The cells' input files are sent as Ray
objects.  The machines need Ray and the packages of requirements.txt.  If a machine dies, Ray runs
its cell on another machine.  A result arrives once or not at all.  Only the driver writes results.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.environment import REPOSITORY, describe, device_slug
from experiments.harness.experiment import Experiment, input_files
from experiments.harness.store import write_atomically
from experiments.harness.workers import Outcome, Task, execute

_EXCLUDED = [".*", "results", "traces", "**/__pycache__"]
"""Parts of the checkout that are not sent."""
_MAX_STARTS = 4
"""Maximum number of starts of a cell if its machines die."""


class NoCluster(RuntimeError):
    """Ray is not installed, there is no checkout, or no cluster answers at the address."""


class RayCluster(contextlib.AbstractContextManager):
    """A connection to the cluster at ``address`` ("auto", "host:port", "ray://host:port").

    It is a context manager that disconnects at its end.  Raises NoCluster.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError:
            raise NoCluster("--ray needs the package ray: pip install ray") from None
        if not (REPOSITORY / "pyproject.toml").exists():
            raise NoCluster("--ray needs a checkout of the repository, to send it to the cluster")
        try:
            _check_port_is_open(address)
            ray.init(
                address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"working_dir": str(REPOSITORY), "excludes": _EXCLUDED},
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise NoCluster(f"--ray {address}: no cluster answers: {error}") from error
        self._ray = ray

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def device_slug(self, experiment: Experiment) -> str:
        """Folder name of the device on which the cells will run."""
        return self._call(device_slug, experiment)

    def describe(self, experiment: Experiment, command: list[str]) -> dict[str, Any]:
        """The environment of one machine that runs cells, and a list of the cluster's machines."""
        here, there = describe(experiment, command), self._call(describe, experiment, command)
        machines = [
            {"cpus": node["Resources"].get("CPU", 0), "gpus": node["Resources"].get("GPU", 0)}
            for node in self._nodes()
        ]
        return {
            **there,
            **{name: here[name] for name in ("command", "commit", "dirty")},
            "ray": {"version": self._ray.__version__, "machines": machines},
        }

    def run(self, experiment: Experiment, tasks: Sequence[Task]) -> Generator[Outcome]:
        """Run ``tasks``.  Closing the generator cancels unfinished tasks."""
        ray = self._ray
        resources = self._resources(experiment)
        if experiment.timed:  # a cell gets a machine of its own
            resources["num_cpus"] = min(node["Resources"]["CPU"] for node in self._nodes())
        begin = ray.remote(_execute).options(max_retries=_MAX_STARTS - 1, **resources)
        put = functools.cache(lambda file: ray.put(file.path.read_bytes()))
        running: dict[Any, Task] = {}
        try:
            for task in tasks:
                running[begin.remote(task, *map(put, input_files(task.cell)))] = task
            while running:
                (done, *_), _ = ray.wait(list(running))
                task = running.pop(done)
                try:
                    yield ray.get(done)
                except ray.exceptions.RayError as error:
                    last_line = str(error).strip().splitlines()[-1]
                    message = f"{type(error).__name__}: {last_line}"
                    yield Outcome(task.key, "failed", message, details=str(error))
        finally:
            for ref in running:
                ray.cancel(ref, force=True)

    def _call(self, function: Any, experiment: Experiment, *arguments: Any) -> Any:
        """Call a function of ``environment`` on a machine that runs cells."""
        remote = self._ray.remote(function).options(**self._resources(experiment))
        return self._ray.get(remote.remote(experiment, *arguments))

    def _nodes(self) -> list[dict[str, Any]]:
        """The machines that run cells."""
        return [
            node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")
        ]

    def _resources(self, experiment: Experiment) -> dict[str, float]:
        """Resources of a cell: a core, and a GPU if the cell uses one and the cluster has any."""
        has_gpus = any(node["Resources"].get("GPU") for node in self._nodes())
        return {"num_cpus": 1, "num_gpus": int(experiment.gpu != "unused" and has_gpus)}


def _check_port_is_open(address: str) -> None:
    """Raise OSError at once if the port is closed.  Ray would retry for a minute."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


def _execute(task: Task, *contents: bytes) -> Outcome:
    """Run ``task`` on this machine, with its input files from ``contents``.

    The files are written into the working directory, which Ray removes after the job.
    """
    for file, content in zip(input_files(task.cell), contents, strict=True):
        path = Path(file.sha256, file.name).absolute()
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            write_atomically(path, content)
        object.__setattr__(file, "path", path)  # changes this process's copy of the cell only
    return execute(task)
