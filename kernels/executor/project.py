"""The only module that depends on the rest of PageLab. Kernels of other projects do not need it."""

import contextlib
import importlib
import types
from collections.abc import Iterator
from typing import Any

from kernels.tiles import Target, force_target

_GATES = ("kernels.checks", "kernels.swap_blocks")
"""Modules whose INTERPRETED says on the host whether kernels take CPU tensors."""


@contextlib.contextmanager
def ops_of_this_project(capability: int, num_multiprocessors: int) -> Iterator[None]:
    """Let the ops accept CPU tensors, with the tiles and split counts of an architecture."""
    modules: list[Any] = [importlib.import_module(name) for name in _GATES]
    gates = [module.INTERPRETED for module in modules]
    for module in modules:
        module.INTERPRETED = types.SimpleNamespace(value=True)
    try:
        with force_target(Target("cuda", capability, num_multiprocessors)):
            yield
    finally:
        for module, gate in zip(modules, gates, strict=True):
            module.INTERPRETED = gate
