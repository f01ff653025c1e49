"""The common prefix of two lists or byte strings."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(one: Sequence, other: Sequence) -> int:
    """Length of the longest common prefix of two lists, or of two byte strings.

    A bisection over slices, which are compared by a loop in C.
    """
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, high = 0, length - 1  # equal up to ``low``, different in the first ``high + 1``
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
