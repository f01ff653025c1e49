"""What a client says about a session: its end, or the pause until its next request."""

import hashlib
import math
from dataclasses import dataclass

from cache.checks import finite, shown

_NUMBERS = 2**53
"""float64 represents smaller integers exactly."""


@dataclass(frozen=True)
class SessionHint:
    """A client's hint about a session of requests, such as an agent's loop or a chat (vLLM's RFC
    52113 and Continuum, arXiv 2511.02230, have the same facts).

    ``SamplingParams.session`` gives the hint of a request.  The eviction policy gets it when the
    request finishes.  ``LLM.hint_session`` corrects the hint.

    Attributes:
        session: id of the session.
        ends: True if the session sends no further request, False if it does, None if unknown.
        expected_pause_ms: expected time from the end of a request to the session's next request, in
            milliseconds; None if unknown.
        pause_spread: standard deviation of the error of ln(expected_pause_ms): 0 if the pause is
            exact, 0.7 if it is mostly right within a factor of 2; None if unknown.  No
            built-in policy uses it.

    Raises ValueError for a session that is neither a text nor an int from 0 to 2**53 - 1, a pause
    or a spread that is negative or not finite, a spread without a pause, and a pause after the end.
    """

    session: str | int
    ends: bool | None = None
    expected_pause_ms: float | None = None
    pause_spread: float | None = None

    def __post_init__(self) -> None:
        session, is_text = self.session, isinstance(self.session, str)
        if not is_text and not (type(session) is int and 0 <= session < _NUMBERS):
            raise ValueError(f"session={shown(session)}: needs a text or an int below 2**53")
        if self.ends is not None and not isinstance(self.ends, bool):
            raise ValueError(f"ends={shown(self.ends)}: needs True, False or None")
        for name in ("expected_pause_ms", "pause_spread"):
            if getattr(self, name) is not None:
                finite(name, getattr(self, name))
        if self.expected_pause_ms is None and self.pause_spread is not None:
            raise ValueError(f"pause_spread={shown(self.pause_spread)}: needs expected_pause_ms")
        if self.ends and self.expected_pause_ms is not None:
            pause = shown(self.expected_pause_ms)
            raise ValueError(
                f"expected_pause_ms={pause}: session {shown(self.session)} ends; leave it out"
            )

    @property
    def number(self) -> float:
        """The session as ``RequestInfo.session``: 52 bits of a hash."""
        code = hashlib.blake2b(ascii(self.session).encode(), digest_size=8).digest()
        return float(int.from_bytes(code) >> 12)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The last fields of ``RequestInfo``, from ``calls_tool`` on."""
        said = self.ends, self.number, self.expected_pause_ms, self.pause_spread
        return (math.nan, *(math.nan if value is None else float(value) for value in said))
