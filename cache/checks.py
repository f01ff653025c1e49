"""Checks of arguments, and of a cache's own state."""

from __future__ import annotations

import operator
import reprlib


def shown(value: object) -> str:
    """``value`` in an error message: short, and also for ints that Python refuses to print."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"<{type(value).__name__}>"


def as_int(name: str, value: int) -> int:
    """``value`` as an int, also from NumPy; ValueError, with the argument's name, for others."""
    if type(value) is int:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: needs an int")
    return number


def at_least(least: int, name: str, value: int) -> int:
    """``value`` as an int; ValueError, with the argument's name, unless it is >= ``least``."""
    try:
        number = as_int(name, value)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name}={shown(value)}: needs an int of at least {least}")
    return number


def true_or_false(name: str, value: bool) -> bool:
    """``value``; ValueError, with the argument's name, unless it is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: needs True or False")
    return value


def callable_or_none(name: str, value: object) -> None:
    """Raise ValueError, with the argument's name, unless ``value`` is None or can be called."""
    if value is not None and not callable(value):
        raise ValueError(f"{name}={shown(value)}: needs a function or None")


def require(condition: bool, message: str) -> None:
    """Raise AssertionError(``message``), also under ``python -O``, unless ``condition`` holds."""
    if not condition:
        raise AssertionError(message)
