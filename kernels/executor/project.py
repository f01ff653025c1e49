"""The only module that depends on the rest of PageLab. Kernels of other projects do not need it."""

import contextlib
import importlib
import types
from collections.abc import Iterator
from unittest import mock

from kernels.tiles import Target, force_target

_GATES = ("kernels.checks", "kernels.swap_blocks")
"""Modules whose INTERPRETED says on the host whether kernels take CPU tensors."""


@contextlib.contextmanager
def ops_of_this_project(capability: int, num_multiprocessors: int) -> Iterator[None]:
    """Let the ops accept CPU tensors, with the tiles and split counts of an architecture."""
    with contextlib.ExitStack() as stack:
        for name in _GATES:
            module, accepts = importlib.import_module(name), types.SimpleNamespace(value=True)
            stack.enter_context(mock.patch.object(module, "INTERPRETED", accepts))
        stack.enter_context(force_target(Target("cuda", capability, num_multiprocessors)))
        yield
