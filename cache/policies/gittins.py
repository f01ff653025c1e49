"""Gittins indices of classes of blocks."""

import math

from cache.policies.base import RequestInfo
from cache.policies.classes import BIN_WIDTHS, NUM_BINS, Array, ClassPolicy, bits

_SHAPE = 8, 5, 4
"""Number of classes by uses (0: end of a prompt, used once), output length and idle time."""
_GROUP = _SHAPE[1] * _SHAPE[2]
"""Number of classes with the same uses."""
_SHRINKAGE = 10.0
"""Weight of evidence at which a class counts as much as its group, and a group as much as 0."""


class Gittins(ClassPolicy):
    """Evicts the block with the fewest expected hits per unit of time in the cache (PageLab).

    The class of a block combines three numbers: log2 of its uses, log4 of the output length of the
    request that released it, and log4 of that request's idle time (see ``ClassPolicy.classify``).
    Ends of prompts that were used once have classes of their own.  The worth of a block is the
    Gittins index of its class at its age.

    The hit rate can fall below LRU's; ``safeguarded`` bounds that.
    """

    name = "gittins"
    num_classes = math.prod(_SHAPE)

    @staticmethod
    def classify(uses: int, is_end: bool, idle_ms: float, request: RequestInfo) -> int:
        kind = 0 if is_end and uses == 1 else min(bits(uses), _SHAPE[0] - 1)
        length = min(max(bits(request.output_tokens) - 3, 0) // 2, _SHAPE[1] - 1)  # from 16 on
        idle = 0 if math.isnan(idle_ms) else 1 + min(max(bits(idle_ms) - 13, 0) // 2, _SHAPE[2] - 2)
        return (kind * _SHAPE[1] + length) * _SHAPE[2] + idle

    @staticmethod
    def learn(returned: Array, gone: Array, worths: Array) -> None:
        """Write Gittins indices (1979) to ``worths``.

        The hazard of a class in an age bin is returned / reached (Kaplan and Meier, 1958).  With
        little evidence it is shrunk towards the hazard of all classes with the same uses, and that
        hazard towards 0.  S(a) is the share of blocks that did not return before age a.  The index
        is the maximum over T > a of (S(a) - S(T)) / (integral of S from a to T): hits per unit of
        time if a block of age a is kept until it returns, but at most until age T.  More uses never
        lower the index; this bound begins with blocks used twice.
        """
        hazards = 0.0 * returned
        for begin in range(0, len(gone), _GROUP):
            reached = gone[begin : begin + _GROUP].copy()
            for bin_ in range(NUM_BINS - 1, -1, -1):
                back = returned[begin : begin + _GROUP, bin_]
                reached += back
                of_group = back.sum() / (reached.sum() + _SHRINKAGE)
                for at in range(_GROUP if of_group else 0):
                    returns = back[at] + _SHRINKAGE * of_group
                    hazards[begin + at, bin_] = returns / (reached[at] + _SHRINKAGE)
        for class_ in range(len(gone)):
            row = [float(hazard) for hazard in hazards[class_]]  # numpy's numbers are slow
            end = NUM_BINS
            while end and row[end - 1] == 0.0:
                end -= 1
            for age in range(NUM_BINS):
                out, space = 1.0, 0.0
                index = float(worths[class_ - _GROUP, age]) if class_ >= 2 * _GROUP else 0.0
                for bin_ in range(age, end):
                    space += BIN_WIDTHS[bin_] * out * (1.0 - row[bin_] / 2.0)
                    out *= 1.0 - row[bin_]
                    if 1.0 - out > index * space:
                        index = (1.0 - out) / space
                    elif index * space >= 1.0:
                        break  # no later T gives a larger index
                worths[class_, age] = index
