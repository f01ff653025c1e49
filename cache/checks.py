"""Checks of arguments, and of a cache's own state."""

import operator
import reprlib
import sys
from numbers import Real

MAX_SIZE = 2**31 - 1
"""Largest size unless a function says otherwise: block ids and lengths are 32-bit integers."""


def shown(value: object) -> str:
    """``value`` in an error message: short, and also for ints that Python refuses to print."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"<{type(value).__name__}>"


def as_int(name: str, value: int) -> int:
    """``value`` as an int, also from NumPy; ValueError, with the argument's name, if it is none."""
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name}={shown(value)}: needs an int")


def at_least(minimum: int, name: str, value: int, maximum: float = MAX_SIZE) -> int:
    """``value`` as an int; ValueError, with the argument's name, unless it is >= ``minimum``.

    An int above ``maximum`` is a ValueError too.
    """
    try:
        number = as_int(name, value)
    except ValueError:
        number = minimum - 1
    if not minimum <= number <= maximum:
        bound = f"at least {minimum}" if number < minimum else f"at most {maximum}"
        raise ValueError(f"{name}={shown(value)}: needs an int of {bound}")
    return number


def finite(name: str, value: float, *, positive: bool = False) -> float:
    """``value``; ValueError, with the argument's name, unless it is finite and at least 0.

    ``positive``: above 0.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= sys.float_info.max) or (positive and value == 0):
        bound = "above 0" if positive else "of at least 0"
        raise ValueError(f"{name}={shown(value)}: needs a finite number {bound}")
    return value


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
