"""Evicts from the session whose next request is expected last."""

import math
from array import array
from collections.abc import Sequence

from cache.checks import true_or_false
from cache.policies.base import RequestInfo
from cache.policies.lazy_heap import LazyHeap
from cache.policies.leaves import LeafPolicy

_NEVER = 2.0**52
"""A session that ends at time t, in ms, is expected at _NEVER - t: the oldest is evicted first."""
_TICK = 2.0**-10
"""Least time between two requests, in ms: it keeps their order."""
_PLACES = 2**12
"""Number of sessions that are remembered.  A session takes the place of an earlier one."""
_NEW = 0.3
"""Weight of a session's latest pause in its mean.  Chosen from 0.05, 0.1 and 0.3 on the first two
thirds of claude_code_512_a, in pools of 0.5, 1 and 2 %."""
_STEP = 0.01
"""Change of the median of errors after each pause."""


class SessionGap(LeafPolicy):
    """Evicts from the session whose next request is expected last, its tail first (PageLab).

    A client tells the pause until the session's next request, and the session's end
    (``RequestInfo``).  With ``predict``, a pause that is not told is predicted: the mean of
    ln(pause) after tool calls (or after other answers, or after unknown answers), plus a moving
    average of the session's deviations, plus the median error.  Otherwise the session is expected
    at once.

    A session that is late by some time is expected after the same time again, so without sessions
    the policy is LRU.  Blocks that a session's next request no longer uses are evicted first, like
    blocks of ended sessions, unless such blocks of the session were used again before.  A block
    that several sessions use keeps the soonest of their times, also if one of them ends.

    Of the 4,096 places for sessions, each belongs to its latest session; an earlier session at the
    place is forgotten.  Preemption counts as the end of a request.

    KVFlow (arXiv 2507.07400) and Continuum (arXiv 2511.02230) use pauses in this way.
    """

    name = "session_gap"

    def __init__(self, predict: bool = False) -> None:
        self.predict = true_or_false("predict", predict)

    def _reset(self) -> None:
        # ``_leaves``: expected leaves, last first; ``_due``: the same leaves, first first.
        self._due: LazyHeap[int] = LazyHeap()
        self._late: LazyHeap[int] = LazyHeap()
        self._latest = -math.inf  # time of the latest request
        # By kind of answer (no tool call, tool call, unknown): number of pauses, mean of ln(pause).
        self._count, self._mean = [0.0] * 3, [math.log(10_000.0)] * 3
        self._median = 0.0  # of the errors of predicted ln(pause)
        # By place: session; of its latest request: deepest block, end, kind of answer; arrival of
        # its running request; whether dropped blocks came back; mean deviation of its pauses.
        none, zero = array("d", [-1.0]) * _PLACES, array("d", [0.0]) * _PLACES  # quick to copy
        self._session, self._tail, self._ended, self._arrived = none[:], none[:], none[:], none[:]
        self._branches, self._kind, self._deviation = zero[:], zero[:], zero[:]

    def tell(self, request: RequestInfo) -> None:
        self._request = request
        if request.time_ms > self._now:
            self._now = request.time_ms
        if request.session >= 0 and math.isnan(request.output_tokens):  # it arrives
            place = int(request.session) % _PLACES
            if self._session[place] != request.session:
                self._session[place] = request.session
                self._tail[place] = self._ended[place] = -1.0
                self._deviation[place] = self._branches[place] = 0.0
            self._arrived[place] = self._now

    def correct(self, request: RequestInfo) -> None:
        if request.time_ms > self._now:
            self._now = request.time_ms
        self._postpone(request.session, self._expected(request, math.nan))

    def _access(self, blocks: Sequence[int]) -> None:
        self._now = self._latest = max(self._now, self._latest + _TICK)
        request, session, predicted = self._request, self._request.session, math.nan
        if session >= 0 and request.output_tokens >= 0 and len(blocks):
            place = int(session) % _PLACES
            kind = int(request.calls_tool) if request.calls_tool >= 0 else 2
            # Further samples and groups of layers of a request do not count.
            if self._session[place] == session and self._arrived[place] >= 0:
                self._drop(place, session, blocks)
                self._learn(place)
                self._ended[place], self._kind[place], self._arrived[place] = self._now, kind, -1
            if self.predict:
                logarithm = self._median + self._mean[kind] + self._deviation[place]
                predicted = math.exp(logarithm)
        expected = self._expected(request, predicted)
        for block in blocks:
            node = self._nodes[block]
            sooner = abs(node.value - self._now) >= abs(expected - self._now)
            if node.owner >= 0 and node.owner != session:
                node.time = 1.0  # several sessions use it
            if sooner or node.value < 0.0 or (node.owner == session and node.time == 0.0):
                node.value, node.owner = expected, session

    def _drop(self, place: int, session: float, blocks: Sequence[int]) -> None:
        """Evict first what the latest request of a session used and ``blocks`` do not contain."""
        for block in blocks:  # a dropped block that is used again: the session has branches
            if self._nodes[block].owner == session and self._nodes[block].value > _NEVER / 2:
                self._branches[place] = 1.0
        if self._branches[place] == 0.0:
            self._postpone(session, _NEVER - self._now)
        self._tail[place] = blocks[0]

    def _postpone(self, session: float, expected: float) -> None:
        """Set the time for the released blocks of the latest request of ``session``, from its tail
        to a block that several sessions use."""
        place = int(session) % _PLACES
        block = int(self._tail[place]) if self._session[place] == session else -1
        while block >= 0 and self._holds(block):
            node = self._nodes[block]
            if not node.released or node.owner != session or node.time > 0.0:
                break
            is_leaf = not node.children
            if is_leaf:
                self._withdraw(block)
            node.value = expected
            if is_leaf:
                self._offer(block)
            block = node.parent

    def _expected(self, request: RequestInfo, predicted_ms: float) -> float:
        """Time of the session's next request, in ms; the current time if the pause is unknown."""
        told = request.expected_pause_ms
        pause = told if told >= 0 else predicted_ms
        if request.ends_session == 1.0:
            return _NEVER - self._now
        return self._now + pause if pause > 0 else self._now

    def _learn(self, place: int) -> None:
        """Learn from the pause between the latest two requests of a session."""
        if self._ended[place] >= 0:
            kind = int(self._kind[place])
            pause = math.log(max(self._arrived[place] - self._ended[place], 1.0))
            self._count[kind] += 1.0
            self._mean[kind] += (pause - self._mean[kind]) / self._count[kind]
            error = pause - self._mean[kind] - self._deviation[place]
            self._deviation[place] += _NEW * error
            self._median += math.copysign(_STEP, error - self._median)

    def _gone(self, block: int) -> None:
        node = self._nodes[block]
        if node.owner >= 0:
            place = int(node.owner) % _PLACES
            if self._session[place] == node.owner and self._tail[place] == block:
                self._tail[place] = node.parent

    def _offer(self, block: int) -> None:
        expected = self._nodes[block].value
        if expected <= self._now:
            self._late.push(block, expected)
        else:
            self._leaves.push(block, -expected)
            self._due.push(block, expected)

    def _withdraw(self, block: int) -> None:
        if block in self._late:
            self._late.remove(block)
        else:
            self._leaves.remove(block)
            self._due.remove(block)

    def _take(self) -> int:
        while self._due.least() <= self._now:
            expected, block = self._due.pop()
            self._leaves.remove(block)
            self._late.push(block, expected)
        if self._now - self._late.least() >= -self._leaves.least() - self._now:
            return self._late.pop()[1] if self._late.least() < math.inf else -1
        block = self._leaves.pop()[1]
        self._due.remove(block)
        return block
