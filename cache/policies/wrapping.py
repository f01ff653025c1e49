"""Policies that wrap another policy."""

from collections.abc import Callable, Hashable, Sequence

from cache.policies.base import EvictionPolicy, RequestInfo


class WrappingPolicy(EvictionPolicy):
    """Passes each call about a request or a content on to ``policy``.

    ``policy`` is the name of a policy, made with ``options``, or a policy object.  A subclass
    defines ``pin``, ``release`` and ``evict``.  A class with several bases lists this class first.
    """

    def __init__(self, policy: str | EvictionPolicy = "lru", **options: object) -> None:
        from cache.policies import as_policy

        self.policy = as_policy(policy, **options)
        self.needs_future = self.policy.needs_future

    def start(self, capacity: int, next_use: Callable[[int], float] | None = None) -> None:
        super().start(capacity, next_use)
        self.policy.start(capacity, next_use)

    def tell(self, request: RequestInfo) -> None:
        super().tell(request)
        self.policy.tell(request)

    def correct(self, request: RequestInfo) -> None:
        self.policy.correct(request)

    def look_up(self, keys: Sequence[Hashable]) -> None:
        self.policy.look_up(keys)

    def on_queued(self, position: tuple[int, ...], keys: Sequence[Hashable]) -> None:
        self.policy.on_queued(position, keys)

    def miss(self, key: Hashable) -> None:
        self.policy.miss(key)

    def insert(self, block: int, key: Hashable, parent: Hashable | None, depth: int) -> None:
        super().insert(block, key, parent, depth)
        self.policy.insert(block, key, parent, depth)
