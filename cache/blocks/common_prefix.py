"""The common beginning of two lists or byte strings."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(one: Sequence, other: Sequence) -> int:
    """Length of the longest common prefix of two lists, or of two strings of bytes.

    Whole slices are compared, which is a loop in C, and halved to find where the two part.
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
