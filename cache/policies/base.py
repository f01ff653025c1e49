"""The interface of eviction policies.

The owner of the blocks (a block pool or the trace replay) notifies the policy:

    tell(request)           the calls that follow are about this request
    miss(key)               this content is not in the cache; evictions for it may follow
    insert(block)           the block begins to hold new content; it is in use
    correct(request)        a client corrects its hint about a session
    release(block)          no request uses it any longer; counts as an access; it may be evicted
    pin(block)              a hit: it is in use again and must not be evicted
    evict() -> block        give up the least valuable released block

A block is *in use* between ``insert`` or ``pin`` and the next ``release``.  Blocks that leave
together are released tail first (the deepest block of the prompt, then its parents), so a policy
that breaks ties by the order of release evicts a prompt from its end, as vLLM v1 does.

A new policy subclasses :class:`cache.policies.priority.PriorityPolicy` if one number per block
ranks the blocks, and :class:`cache.policies.classes.ClassPolicy` if class and age rank them.  The
replay compiles both.  A policy that keeps blocks in queues subclasses
:class:`cache.policies.queues.QueuePolicy`, any other policy this class.
"""

import abc
import copy
import inspect
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple


class RequestInfo(NamedTuple):
    """Facts about a request.  NaN: not known (yet)."""

    time_ms: float
    """Arrival time in a replay, time of the call in an engine.  The origin is arbitrary."""
    prompt_tokens: float
    output_tokens: float
    """Generated tokens; NaN until the blocks of the request are released."""
    prompt_blocks: float
    """Blocks of the prompt; a partly filled last block counts if the trace gives it an id."""
    calls_tool: float = math.nan
    """1 if the output ends in a tool call, 0 if not; NaN until the blocks are released."""
    ends_session: float = math.nan
    """1 for the last request of a session, 0 for others; NaN until the blocks are released."""
    session: float = math.nan
    """Number of the session: equal numbers mean the same session."""
    expected_pause_ms: float = math.nan
    """Expected time from the release of the blocks to the session's next request, as the client or
    the trace says; NaN until the blocks are released."""
    pause_spread: float = math.nan
    """Standard deviation of the error of ln(expected_pause_ms), 0 for an exact pause."""


UNKNOWN_REQUEST = RequestInfo(math.nan, math.nan, math.nan, math.nan)


def request_info(row: Sequence[float], has_ended: bool) -> RequestInfo:
    """``RequestInfo`` of a row of ``Trace.request_facts``, before or after the request's end."""
    end = row[2], row[4], row[5], row[7], row[8]
    if not has_ended:
        end = math.nan, math.nan, math.nan, math.nan, math.nan
    return RequestInfo(row[0], row[1], end[0], row[3], end[1], end[2], row[6], end[3], end[4])


class EvictionPolicy(abc.ABC):
    """Chooses which unused block to give up.  One object serves one pool at a time."""

    name: str = ""
    """Registry name, as in ``make_policy(name)``.  The default is the name of the class."""

    needs_future: bool = False
    """True for offline policies: ``start`` must be given ``next_use``."""

    hooks: frozenset[str] = frozenset()
    """The optional methods that a class defines.  Owners need to call only these methods."""

    compilable: bool = False
    """Whether ``cache.simulate`` may compile the policy.  True for a class of this package and for
    a subclass that overrides only ``_COMPILED_WITH_A_POLICY``.  Set False to run in Python."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__
        optional = {"tell", "correct", "look_up", "on_queued", "miss", "insert", "remove"}
        cls.hooks = frozenset(optional & _overridden(cls, EvictionPolicy))
        if "compilable" not in vars(cls):
            base = next(base for base in cls.__mro__[1:] if issubclass(base, EvictionPolicy))
            cls.compilable = cls.__module__.startswith("cache.policies.") or (
                base.compilable and not _overridden(cls, base) - _COMPILED_WITH_A_POLICY
            )

    @abc.abstractmethod
    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        """Forget everything and prepare for a pool of ``capacity`` blocks.

        ``next_use(block)`` is called for a block that is being released.  It returns when the
        content is used next, in any increasing measure of time; ``math.inf`` for never.  Offline
        policies raise ValueError without it.
        """
        self._capacity = capacity

    def tell(self, request: RequestInfo) -> None:  # noqa: B027
        """The next calls are about ``request``.

        Called before the first miss or eviction for a request, and again before its blocks are
        released.  An engine does not call it for blocks that a request allocates while decoding.
        """

    def correct(self, request: RequestInfo) -> None:  # noqa: B027
        """A client corrects its hint about ``request.session``, which has no running request.

        ``time_ms``, ``ends_session``, ``expected_pause_ms`` and ``pause_spread`` are new; the pause
        counts from ``time_ms``.  Other fields are NaN.  Optional.
        """

    def look_up(self, keys: Sequence[Hashable]) -> None:  # noqa: B027
        """A request asks for the contents ``keys``, from the head of its prompt.

        ``keys`` exclude a last block that must be computed in any case.  Called before the request
        pins, misses or evicts anything.  Optional.  ``radix`` does not call it.
        """

    def on_queued(self, position: tuple[int, ...], keys: Sequence[Hashable]) -> None:  # noqa: B027
        """The request at ``position`` of the waiting queue will ask for ``keys``.

        Empty ``keys`` mean that the request left the queue.  The smallest ``position`` is served
        first.  Optional: only schedulers with ``nano_vllm`` or ``vllm_v1`` call it.
        """

    def miss(self, key: Hashable) -> None:  # noqa: B027
        """The content ``key`` was looked up and is absent; evictions and its insert may follow.

        Called before the evictions that make room for the content, so that policies that remember
        evicted keys (2Q, ARC, S3-FIFO, MQ) can choose the victim by the new content.
        """

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:  # noqa: B027
        """``block`` begins to hold new content and is in use.

        ``key`` identifies the content; a policy may remember it after the eviction, as ARC's ghost
        lists do.  ``parent``: key of the previous block in the prompt, None for the first block.
        ``depth``: position of the block in the prompt, counted in blocks from 0.
        """

    @abc.abstractmethod
    def pin(self, block: int) -> None:
        """A released ``block`` is in use again: it must not be evicted until released."""

    @abc.abstractmethod
    def release(self, block: int) -> None:
        """No request uses ``block`` any longer.  Counts as an access; it may be evicted now."""

    @abc.abstractmethod
    def evict(self) -> int:
        """Remove and return the block to evict.  Raises IndexError if no block is released."""

    def remove(self, block: int) -> None:
        """Evict the released ``block`` that the caller chose.  ``Safeguarded`` calls it."""
        raise NotImplementedError(f"policy {self.name!r} does not define remove(block)")

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of released blocks."""

    def __iter__(self) -> Iterator[int]:
        """Released blocks in the order in which ``evict`` would return them now."""
        rehearsal = copy.deepcopy(self)
        while len(rehearsal):
            yield rehearsal.evict()

    def pin_many(self, blocks: Iterable[int]) -> None:
        """``pin`` each of ``blocks``, in order."""
        for block in blocks:
            self.pin(block)

    def release_many(self, blocks: Iterable[int]) -> None:
        """``release`` each of ``blocks``, in order: the tail of a prompt first."""
        for block in blocks:
            self.release(block)

    def evict_many(self, count: int) -> list[int]:
        """``evict`` ``count`` times; IndexError and no eviction if too few blocks are released."""
        if count > len(self):
            raise IndexError(f"evict_many: count={count}, but {len(self)} blocks are released")
        return [self.evict() for _ in range(count)]


_COMPILED_WITH_A_POLICY = {"own_state", "priority", "classify", "learn"}


def _overridden(cls: type, base: type) -> set[str]:
    """Methods of ``base`` that ``cls`` overrides, without special methods."""
    methods = {name for name in dir(base) if not name.startswith("__")}
    methods = {name for name in methods if callable(getattr(cls, name))}
    static = inspect.getattr_static
    return {name for name in methods if static(cls, name) is not static(base, name)}


def check_victims(
    policy: EvictionPolicy,
    victims: Collection[Any],
    is_released: Callable[[int], bool],
    count: int = 1,
) -> None:
    """Raise RuntimeError that names ``policy`` unless ``victims`` are ``count`` released blocks.

    Victims must differ.  For speed, policies of this package are not checked.
    """
    if type(policy).__module__.startswith("cache."):
        return
    if not isinstance(victims, Collection):
        raise RuntimeError(f"policy {policy.name!r}: evict_many({count}) gave {victims!r}, no list")
    seen = set()
    for victim in victims:
        is_block = isinstance(victim, Integral) and int(victim) >= 0
        if not is_block or victim in seen or not is_released(victim):
            raise wrong_victim(policy, victim)
        seen.add(victim)
    if len(victims) != count:
        raise RuntimeError(
            f"policy {policy.name!r}: evict_many({count}) gave {len(victims)} blocks: {victims!r}"
        )


def wrong_victim(policy: EvictionPolicy, victim: object) -> RuntimeError:
    return RuntimeError(f"policy {policy.name!r}: evict() gave {victim!r}, not a released block")
