"""Random lengths, popularity and arrivals of workloads.

Values are sampled one by one, so a longer workload begins with a shorter workload's requests.  They
are rounded to whole tokens and milliseconds, so the last digit of ``exp`` does not matter.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Rng: TypeAlias = "np.random.Generator"


def generator(seed: int) -> Rng:
    """The random number generator of a workload."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(seed))


def log_normal(rng: Rng, median: float, sigma: float) -> float:
    """Sample a log-normal value; ``sigma``: standard deviation of its natural logarithm."""
    return median * math.exp(min(sigma * rng.standard_normal(), 600))  # finite in any case


def log_normal_tokens(rng: Rng, median: float, sigma: float) -> int:
    """Sample a log-normal number of tokens, at least 1.  Raises ValueError above 2**24."""
    tokens = log_normal(rng, median, sigma)
    if tokens > 2**24:
        raise ValueError(f"median={median}, sigma={sigma}: a text of {tokens:.0f} tokens was drawn")
    return max(1, round(tokens))


def poisson_arrivals_ms(rng: Rng, rate_per_second: float) -> Iterator[int]:
    """Arrival times of an endless Poisson process, in whole milliseconds."""
    now = 0.0
    while True:
        now += 1000 / rate_per_second * rng.standard_exponential()
        yield round(now)


class Zipf:
    """Samples ranks 0 to ``size - 1``: rank r in proportion to ``(r + 1) ** -exponent``.

    Exponent 0 is uniform.  The popularity of web pages and prompts usually has an exponent near 1.
    """

    def __init__(self, size: int, exponent: float) -> None:
        self._exponent = exponent
        weights = ((rank + 1) ** -exponent for rank in range(size))
        self._cumulative = list(itertools.accumulate(weights))

    def draw(self, rng: np.random.Generator) -> int:
        return bisect.bisect_right(self._cumulative, rng.random() * self._cumulative[-1])

    def draw_distinct(self, rng: Rng, count: int) -> list[int]:
        """``count`` different ranks, sampled without replacement, in random order."""
        import numpy as np

        # Gumbel-max trick: the largest log weights plus noise sample without replacement.
        ranks = np.arange(1, len(self._cumulative) + 1)
        keys = rng.gumbel(size=len(ranks)) - self._exponent * np.log(ranks)
        chosen = np.sort(np.argpartition(-keys, count - 1)[:count])
        return rng.permutation(chosen).tolist()


def interleaved(
    arrivals_ms: Iterator[int], session: Callable[[int], Iterator[tuple]]
) -> Iterator[tuple]:
    """Merge the requests of endlessly many sessions in order of time.

    ``session(arrival_ms)`` iterates over the requests of a session: tuples that begin with a
    timestamp.  Timestamps ascend from ``arrival_ms``.
    """
    waiting: list[tuple[int, int, tuple, Iterator[tuple]]] = []  # by time of the next request

    def wait(number: int, requests: Iterator[tuple]) -> None:
        if (request := next(requests, None)) is not None:
            heapq.heappush(waiting, (request[0], number, request, requests))

    for number, arrival in enumerate(arrivals_ms):
        while waiting and waiting[0][0] < arrival:
            _, earlier, request, rest = heapq.heappop(waiting)
            yield request
            wait(earlier, rest)
        wait(number, session(arrival))
