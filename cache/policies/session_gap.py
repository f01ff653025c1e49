"""Evicts from the session whose next request is expected last."""

import math
from collections.abc import Sequence

from cache.checks import true_or_false
from cache.policies.base import RequestInfo
from cache.policies.lazy_heap import LazyHeap
from cache.policies.leaves import LeafPolicy

_NEVER = 2.0**52
"""A session that ends at time t, in ms, is expected at _NEVER - t: the oldest is evicted first."""
_TICK = 2.0**-10
"""Least time between two requests, in ms: it keeps their order."""
_PLACES = 2**14
"""Number of sessions that are remembered.  A session takes the place of an earlier one."""
_NEW = 0.3
"""Weight of a session's latest pause in its mean; chosen on two thirds of claude_code_512_a."""
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
    the policy is LRU.  A block is expected with the first of the sessions that used it.  Blocks
    that a session's next request no longer uses are evicted first, like blocks of ended sessions.

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
        # By place: session; of its latest request: deepest block, end, kind; mean deviation.
        self._session, self._tail = [-1.0] * _PLACES, [-1.0] * _PLACES
        self._ended, self._branches = [0.0] * _PLACES, [0.0] * _PLACES
        self._kind, self._deviation = [0.0] * _PLACES, [0.0] * _PLACES

    def correct(self, request: RequestInfo) -> None:
        self.tell(request)
        self._postpone(request.session, self._expected(request))

    def _access(self, blocks: Sequence[int]) -> None:
        self._now = self._latest = max(self._now, self._latest + _TICK)
        session = self._request.session
        expected = self._expected(self._request)
        if session >= 0 and len(blocks):
            place = int(session) % _PLACES
            if self._session[place] != session:
                self._branches[place] = 0.0
            for block in blocks:  # a block that the session dropped came back
                if self._nodes[block].owner == session and self._nodes[block].value > _NEVER / 2:
                    self._branches[place] = 1.0
            if self._branches[place] == 0.0:
                self._postpone(session, _NEVER - self._now)  # blocks that it no longer uses
            self._session[place], self._tail[place] = session, blocks[0]
        for block in blocks:
            node = self._nodes[block]
            sooner = abs(node.value - self._now) >= abs(expected - self._now)
            if sooner or node.owner == session or node.value < 0.0:
                node.value, node.owner = expected, session

    def _postpone(self, session: float, expected: float) -> None:
        """Set the time for the released blocks of the latest request of ``session``."""
        place = int(session) % _PLACES
        block = int(self._tail[place]) if self._session[place] == session else -1
        while block >= 0 and self._holds(block):
            node = self._nodes[block]
            if not node.released or node.owner != session:
                break
            is_leaf = not node.children
            if is_leaf:
                self._withdraw(block)
            node.value = expected
            if is_leaf:
                self._offer(block)
            block = node.parent

    def _expected(self, request: RequestInfo) -> float:
        """Time of the session's next request, in ms; the current time if the session is unknown."""
        pause = request.expected_pause_ms
        if self.predict and request.session >= 0 and request.prompt_tokens >= 0:  # not corrected
            predicted = self._predicted(request)
            pause = pause if pause >= 0 else predicted
        if request.ends_session == 1.0:
            return _NEVER - self._now
        return self._now + pause if pause > 0 else self._now

    def _predicted(self, request: RequestInfo) -> float:
        """Learn from the pause before ``request``, and predict the pause after it, in ms."""
        place = int(request.session) % _PLACES
        kind = int(request.calls_tool) if request.calls_tool >= 0 else 2
        if self._session[place] == request.session:
            before = int(self._kind[place])
            pause = math.log(max(self._now - self._ended[place], 1.0))
            self._count[before] += 1.0
            self._mean[before] += (pause - self._mean[before]) / self._count[before]
            error = pause - self._mean[before] - self._deviation[place]
            self._deviation[place] += _NEW * error
            self._median += math.copysign(_STEP, error - self._median)
        else:
            self._deviation[place] = 0.0
        self._ended[place], self._kind[place] = self._now, kind
        return math.exp(self._median + self._mean[kind] + self._deviation[place])

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
