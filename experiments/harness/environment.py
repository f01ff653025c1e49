"""The environment of a run, recorded beside every table."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.harness.experiment import Experiment

REPOSITORY = Path(__file__).resolve().parents[2]
"""Root of the checkout, or the folder that contains the installed wheel."""


PACKAGES = ("cache/", "experiments/", "kernels/", "models/")
"""Folders of the packages in ``REPOSITORY``."""


def committed(experiment: str, device: str = "cpu") -> Path:
    """Folder of an experiment's committed results.  An installed wheel has none."""
    return REPOSITORY / "results" / experiment / device


def device_slug(experiment: Experiment) -> str:
    """Folder name of the device on which ``experiment`` runs here, such as cpu or nvidia-h200."""
    if experiment.gpu == "unused" or not cuda_available():
        return "cpu"
    import torch

    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def cuda_available() -> bool:
    """Whether PyTorch finds a CUDA device.  It is asked only if there is a driver: that is slow."""
    if "torch" not in sys.modules and not _has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def _has_driver() -> bool:
    """Whether the library of CUDA's driver is here, or a device of ROCm's, in WSL of DirectX's."""
    try:
        ctypes.CDLL("libcuda.so.1")  # as the CUDA runtime opens it
    except OSError:
        return os.path.exists("/dev/kfd") or os.path.exists("/dev/dxg")
    return True


def describe(experiment: Experiment, command: list[str]) -> dict[str, Any]:
    """The environment of one run.  It contains no path of this machine."""
    commit, dirty = _git_state()
    cuda: object = None
    if experiment.gpu != "unused" and cuda_available():
        from torch.version import cuda
    return {
        "command": " ".join(map(_without_folders, command)),
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "packages": dict(sorted((d.name, d.version) for d in importlib.metadata.distributions())),
        "os": platform.platform(),
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
        },
        "gpu": _gpus(),
        "cuda": cuda,
    }


def _without_folders(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if equals and os.sep in value:
        return f"{option}={Path(value).name}"
    return Path(argument).name if os.sep in argument else argument


def _git_state() -> tuple[str | None, bool | None]:
    """The commit, and whether a file differs from it: a tracked file outside results/, or a new
    file of the packages.

    The commit is ``PAGELAB_COMMIT``, else HEAD: the files of a copy may be newer than its HEAD.
    If git does not have the commit: ``PAGELAB_COMMIT`` or the installed version, and None.
    """
    named = os.environ.get("PAGELAB_COMMIT")

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), "--git-dir", ".git", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        commit = git("rev-parse", "--verify", f"{named or 'HEAD'}^{{commit}}").strip()
        new = git("ls-files", "--others", "--exclude-standard", "--", *PACKAGES)
        changed = git("diff", "--name-only", commit, "--", ".", ":(exclude)results")
        return commit, bool(new or changed)
    except (OSError, subprocess.CalledProcessError):
        version = version_of("pagelab")
        return named or (f"none, version {version}" if version else None), None


def version_of(package: str) -> str | None:
    """The installed version of a package.  None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Name, family and model number of the CPU, because virtual machines shorten the name."""
    text = Path("/proc/cpuinfo").read_text()
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.+)$", text, re.M))
    if len(fields) < 3:
        return platform.machine()
    return "{model name} (family {cpu family}, model {model})".format_map(fields)


def _gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each NVIDIA GPU."""
    fields = {"name": "name", "driver": "driver_version", "memory": "memory.total"}
    query = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    lines = (map(str.strip, line.split(",")) for line in printed.splitlines())
    return [dict(zip(fields, line, strict=True)) for line in lines]
