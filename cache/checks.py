"""Checks of arguments and of a cache's internal state."""

import math
import operator
import reprlib
from numbers import Real

MAX_SIZE = 2**31 - 1
"""Default maximum of a size: block ids and lengths are 32-bit integers."""


def shown(value: object) -> str:
    """Return a short text of ``value`` for an error message, even if Python cannot print it."""
    try:
        return reprlib.repr(value).replace("\n", " ")
    except ValueError:
        return f"<{type(value).__name__}>"


def as_int(name: str, value: int) -> int:
    """Return ``value`` (an int or a NumPy integer) as an int.  Raises ValueError otherwise."""
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name}={shown(value)}: needs an int")


def at_least(minimum: int, name: str, value: int, maximum: float = MAX_SIZE) -> int:
    """Return ``value`` as an int.

    Raises ValueError, with the argument's name, unless minimum <= value <= maximum.
    """
    try:
        number = as_int(name, value)
    except ValueError:
        number = minimum - 1
    if not minimum <= number <= maximum:
        bound = f"at least {minimum}" if number < minimum else f"at most {maximum}"
        raise ValueError(f"{name}={shown(value)}: needs an int of {bound}")
    return number


def is_finite(value: object) -> bool:
    """Whether ``value`` is a real number within the range of float64."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an int of more than 308 digits
        return False


def finite(name: str, value: float, *, positive: bool = False) -> float:
    """Return ``value``.  ValueError, with the argument's name, unless it is finite and at least 0.

    ``positive``: 0 is a ValueError too.
    """
    is_number = is_finite(value) and not isinstance(value, bool)
    if not (is_number and value >= 0) or (positive and value == 0):
        bound = "above 0" if positive else "of at least 0"
        raise ValueError(f"{name}={shown(value)}: needs a finite number {bound}")
    return value


def true_or_false(name: str, value: bool) -> bool:
    """Return ``value``.  ValueError, with the argument's name, unless it is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: needs True or False")
    return value


def callable_or_none(name: str, value: object) -> None:
    """Raise ValueError, with the argument's name, unless ``value`` is None or can be called."""
    if value is not None and not callable(value):
        raise ValueError(f"{name}={shown(value)}: needs a function or None")


def require(condition: bool, message: str) -> None:
    """Raise AssertionError unless ``condition`` is true, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)
