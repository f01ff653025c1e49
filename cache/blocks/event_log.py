"""A log of what happens to blocks."""

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Literal, NamedTuple

from cache.checks import callable_or_none

Kind = Literal["allocated", "hit", "cached", "evicted", "freed"]


class Event(NamedTuple):
    """An event of one block."""

    time: float
    kind: Kind
    """``allocated``: taken by its first user.  ``hit``: its content was found, and it got one more
    user.  ``cached``: its content can be found from now on.  ``evicted``: its content was dropped,
    to reuse the block.  ``freed``: its last user left."""
    block: int
    content: Hashable
    """Identifies the content that was found, cached or dropped; None for other events."""


class EventLog:
    """Events of a manager made with ``event_log=``.  It grows with every event.

    ``clock`` returns the time of an event, for example modelled or wall-clock time.  With None it
    is the number of the ``record`` call.  A call adds one event per block, all of the same kind.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        callable_or_none("clock", clock)
        self.events: list[Event] = []
        self._clock = clock or itertools.count().__next__

    def record(self, kind: Kind, blocks: Iterable[int], contents: Iterable[Hashable] = ()) -> None:
        """Append an event for each block, all with the same time; ``contents`` match the blocks."""
        pairs = list(itertools.zip_longest(blocks, contents))
        if pairs:
            now = self._clock()
            self.events += [Event(now, kind, block, content) for block, content in pairs]
