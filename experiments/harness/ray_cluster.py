"""Runs tasks on the machines of a Ray cluster.

The repository is sent to the machines as the working directory of the workers, and the input files
of the cells as objects.  The machines need the packages of
requirements.txt.  Ray gives a cell whose machine dies to another machine; a result arrives once or
not at all, and only the driver writes results.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.harness.environment import describe, device_slug
from experiments.harness.experiment import Experiment, InputFile, input_files, with_files
from experiments.harness.store import write_atomically
from experiments.harness.workers import Outcome, Task, execute

_REPOSITORY = Path(__file__).resolve().parents[2]
_STAYS_HERE = [
    ".git",
    ".venv",
    ".pytest_cache",
    "results",
    "traces",
    "**/__pycache__",
    ".hypothesis",
]
_LIVES = 4
"""Most starts of a cell whose machines die."""


class NoCluster(RuntimeError):
    """There is no Ray, or no cluster at the address."""


class RayCluster:
    """A connection to the cluster at ``address`` ("auto", "host:port", "ray://host:port").

    A context manager, which disconnects.  Raises NoCluster.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError:
            raise NoCluster("--ray needs the package ray: pip install ray") from None
        try:
            _check_port_is_open(address)
            ray.init(
                address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"working_dir": str(_REPOSITORY), "excludes": _STAYS_HERE},
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise NoCluster(f"--ray {address}: no cluster answers: {error}") from error
        self._ray = ray

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def device_slug(self, experiment: Experiment) -> str:
        """The folder of the device that the cells will run on."""
        return self._call(experiment, device_slug)

    def describe(self, experiment: Experiment, command: list[str]) -> dict[str, Any]:
        """The environment of a machine that runs cells, and the cluster's machines."""
        here = describe(experiment, command)
        there = self._call(experiment, describe, [])
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
        """Run ``tasks``; an executor once ``experiment`` is bound.  Closing it ends the rest."""
        ray = self._ray
        begin = ray.remote(_execute).options(
            max_retries=_LIVES - 1, **self._resources(experiment, whole_machine=experiment.timed)
        )
        put = functools.cache(lambda file: ray.put(file.path.read_bytes()))
        running: dict[Any, Task] = {}
        try:
            for task in tasks:
                files = [*input_files(task.cell)]
                running[begin.remote(task, files, *map(put, files))] = task
            while running:
                (done, *_), _ = ray.wait(list(running))
                task = running.pop(done)
                try:
                    yield ray.get(done)
                except ray.exceptions.RayError as error:
                    last_line = str(error).strip().splitlines()[-1]
                    message = f"{type(error).__name__}: {last_line}"
                    yield Outcome(task.key, "failed", [], message, str(error), 0.0)
        finally:
            for ref in running:
                ray.cancel(ref, force=True)

    def _call(self, experiment: Experiment, function: Any, *arguments: Any) -> Any:
        """Call a function of ``environment`` on a machine that runs cells."""
        asked = SimpleNamespace(gpu=experiment.gpu)
        remote = self._ray.remote(function).options(**self._resources(experiment))
        return self._ray.get(remote.remote(asked, *arguments))

    def _nodes(self) -> list[dict[str, Any]]:
        return [
            node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")
        ]

    def _resources(
        self, experiment: Experiment, *, whole_machine: bool = False
    ) -> dict[str, float]:
        """Resources of one cell: a core, and a GPU if it uses one and the cluster has any.

        A cell that measures time gets a machine of its own.
        """
        nodes = self._nodes()
        has_gpus = any(node["Resources"].get("GPU") for node in nodes)
        return {
            "num_cpus": min(n["Resources"]["CPU"] for n in nodes) if whole_machine else 1,
            "num_gpus": 1 if experiment.gpu != "unused" and has_gpus else 0,
        }


def _check_port_is_open(address: str) -> None:
    """Raise OSError at once where Ray would retry for a minute."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


def _execute(task: Task, files: list[InputFile], *contents: bytes) -> Outcome:
    """Run ``task`` on this machine, with its input files from ``contents``.

    They are written into the working directory, which Ray removes after the job.
    """
    local = {}
    for file, content in zip(files, contents, strict=True):
        path = Path(file.sha256, file.name).absolute()
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            write_atomically(path, content)
        local[file] = InputFile(path, file.sha256)
    return execute(dataclasses.replace(task, cell=with_files(task.cell, local.__getitem__)))
