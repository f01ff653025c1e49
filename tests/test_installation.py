"""A wheel, installed into an empty environment, serves users in any folder."""

import ast
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cache.replay import operations

ROOT = Path(__file__).parents[1]
PACKAGES = ("cache", "experiments", "kernels", "models")
OTHER_PROJECTS = {"flash_attn_interface", "nanovllm", "sglang", "vllm"}
"""Baselines that are no dependencies: experiments use them where they are installed."""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of all that an installation reads."""
    folder = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory) -> Path:
    """Programs of an environment with the wheel alone; it borrows other packages from this one.

    A path file adds the folder of those, but not the link to this repository that is in it.
    """
    environment = tmp_path_factory.mktemp("env")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", source / "dist"]
    subprocess.run([*pip, "wheel", *options, source], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    [wheel] = (source / "dist").iterdir()
    programs = environment / "bin"
    install = ["--python", programs / "python", "install", "--no-deps", "--no-compile", wheel]
    subprocess.run([*pip, *install], check=True)
    [packages] = environment.glob("lib/*/site-packages")
    for folder in ("cache/replay", "kernels/executor"):  # root, too, can make no folder there
        (packages / folder / "__pycache__").touch()
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return programs


def run(folder: Path, *command: str | Path) -> str:
    """What a command prints in ``folder``, which is, as in a container, all that it can write."""
    unset = "NUMBA", "PYTHON", "TRITON", "XDG"  # some lead to this repository
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    env |= {"HOME": os.devnull, "TMPDIR": str(folder)}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_an_editable_install_is_a_path(source, tmp_path):
    """An import hook would come after a folder `models` beside a script; a path does not."""
    build = "from setuptools.build_meta import build_editable; print(build_editable({!r}))"
    *_, wheel = run(source, sys.executable, "-c", build.format(str(tmp_path))).split()
    with zipfile.ZipFile(tmp_path / wheel) as files:
        [link] = (name for name in files.namelist() if "/" not in name)
        assert files.read(link).decode().strip() == str(source)


def test_compiled_kernels_are_kept_in_the_temporary_folder(installed, tmp_path):
    code = "import os, sys, kernels.executor as _; get = os.environ.get"
    code += (
        "; print(get('TRITON_CACHE_DIR'), get('NUMBA_CACHE_DIR'), 'torch._dynamo' in sys.modules)"
    )
    code += "; from cache.retired import advice; print(advice('policy priority'))"
    folder = tmp_path / f"pagelab-{os.geteuid()}"
    printed = f"{folder} {folder} False\npolicy priority is gone; instead: retention\n"
    assert run(tmp_path, installed / "python", "-c", code) == printed


def test_commands_work_in_an_empty_folder(installed, tmp_path):
    assert "memory_waste" in run(tmp_path, installed / "pagelab", "list")
    [trace] = installed.parent.rglob("ragpulse_16_first_1500.jsonl.zst")
    assert "rank 1 of 1" in run(tmp_path, installed / "pagelab", "try", "lru", "--trace", trace)
    assert (tmp_path / "results/try/hit_rate.png").stat().st_size > 5_000
    assert [*tmp_path.glob("pagelab-*/*/operations.*.nbi")]


def test_numba_keeps_no_code_in_a_folder_of_another_user(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.njit", Mock(side_effect=RuntimeError))  # numba finds no folder
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: -1)
    assert not operations._finds_folder()


def test_every_imported_package_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    declared = {canonicalize_name(Requirement(text).name) for text in listed}
    others = OTHER_PROJECTS.union(PACKAGES, sys.stdlib_module_names)
    distributions = packages_distributions()
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {name.partition(".")[0] for name in names} - others:
                owners = map(canonicalize_name, distributions.get(name, [name]))
                assert not declared.isdisjoint(owners), f"{path} imports {name}"
