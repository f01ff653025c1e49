"""Checks that are used all over the cache: of arguments, and of the cache's own state."""

from __future__ import annotations

import operator
import reprlib


def at_least(least: int, name: str, value: int) -> int:
    """``value`` as an int; ValueError, naming it, unless it is one of at least ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name}={reprlib.repr(value)}: needs an int of at least {least}")
    return number


def require(condition: bool, message: str) -> None:
    """Raise AssertionError(``message``), also under ``python -O``, unless ``condition`` holds."""
    if not condition:
        raise AssertionError(message)
