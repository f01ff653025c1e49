"""Triton's interpreter without work that it repeats, about two thirds of its time on our kernels.

Where there is no GPU the kernels run there, and what a program costs is the Python around each of
its operations, not the arithmetic. The answers stay the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter

_PATCHED_NOTHING = SimpleNamespace(restore=lambda: None)


@functools.cache
def _languages(fn: Callable) -> tuple:
    """The modules that an interpreted function may take its operations from."""
    visible = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
    return tuple(language for language in (tl, tl.core) if language in visible)


def _once_per_launch(patch_lang: Callable) -> Callable:
    """A launch replaces the operations of triton.language until it ends. Its calls of device
    functions need not look through all members of the language again."""

    @functools.wraps(patch_lang)
    def patch(fn):
        operations = (tl.tensor.__add__, *(language.arange for language in _languages(fn)))
        return patch_lang(fn) if any(map(is_builtin, operations)) else _PATCHED_NOTHING

    return patch


def _by_name(get_np_dtype: Callable) -> Callable:
    """The table of all dtypes is not built anew for each lookup."""
    known = {}

    @functools.wraps(get_np_dtype)
    def get(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = get_np_dtype(dtype)
        return known[name]

    return get


def hasten() -> None:
    """Spare Triton's interpreter the repetition; what a version of Triton lacks stays as it is."""
    for name, hastened in (("_patch_lang", _once_per_launch), ("_get_np_dtype", _by_name)):
        if hasattr(interpreter, name):
            setattr(interpreter, name, hastened(getattr(interpreter, name)))
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow"):
        # Without `debug` each sum and product is checked, in a dozen operations, for no report.
        builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
