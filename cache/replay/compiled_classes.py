"""``ClassPolicy`` in compiled code.

Each class has a circular list of its blocks in the order of release.  The last records of the array
are the ends of these lists.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import numba.extending
import numpy as np

from cache.policies.classes import ClassPolicy, age_bin, bits, worth_at
from cache.replay.containers import LINKS, empty_lists, ghosts, link, unlink
from cache.replay.operations import Array, Compiled, Operations
from cache.traces.trace import Trace

_BLOCK = np.dtype(
    [
        *LINKS.descr,
        ("released_ms", np.float64),
        ("weight", np.float64),
        ("number", np.int64),
        ("uses", np.int64),  # releases of the content that are remembered
        ("class_", np.int64),
    ]
)
for _function in (bits, age_bin, worth_at):
    numba.extending.register_jitable(_function)


def operations_of(policy: ClassPolicy, trace: Trace, capacity: int) -> Operations:
    policy.start(capacity)
    state = {name: getattr(policy, name) for name in _SHARED_STATE} | {
        "_blocks": empty_lists(trace.num_unique_blocks + policy.num_classes, _BLOCK),
        "_ghosts": ghosts(policy, trace, capacity),
        "first_end": trace.num_unique_blocks,
    }
    methods = _methods(policy.classify, policy.learn, policy.num_classes, policy.name)
    return Operations(policy.name, methods, state)


_SHARED_STATE = (
    "_returned", "_gone", "_worths", "_num_releases", "_learn_at", "_request", "_now",
    "_class", "_number", "_released_ms",
)  # fmt: skip
_SHARED = {name: vars(ClassPolicy)[name] for name in ("tell", "remove", "_access", "_choose")}


@functools.cache
def _methods(classify: Callable, learn: Callable, num_classes: int, name: str) -> dict[str, Any]:
    numba.extending.register_jitable(classify)
    numba.extending.register_jitable(learn)
    of_class = f"policy {name!r}: classify gave a class beyond 0 to {num_classes - 1}"
    of_worth = f"policy {name!r}: learn gave a worth that is not finite"

    def _refuse_class(self: Compiled) -> NoReturn:
        raise ValueError(of_class)

    def _refuse_worth(self: Compiled) -> NoReturn:
        raise ValueError(of_worth)

    own = {
        "classify": lambda self, uses, is_end, idle, request: classify(uses, is_end, idle, request),
        "learn": lambda self, returned, gone, worths: learn(returned, gone, worths),
        "_check_released": lambda self, block: None,  # a replay knows its blocks
        "_candidates": lambda self: range(len(self._worths)),
    }
    of_policy = (_refuse_class, _refuse_worth, insert, pin, release_many)
    of_containers = (evict, _append, _oldest, _give_up)
    return _SHARED | own | {f.__name__: f for f in of_policy + of_containers}


def insert(self: Compiled, block: int, key: int, parent: int, depth: int) -> None:
    record = self._blocks[block]
    if self._ghosts.take(block):
        self._gone[record.class_] -= record.weight
    else:
        record.uses = 0


def pin(self: Compiled, block: int) -> None:
    self._class = -1
    unlink(self._blocks, block)


def release_many(self: Compiled, blocks: Array) -> None:
    self._class = -1
    self._access(blocks)


def evict(self: Compiled) -> int:
    block = self._choose()
    self._give_up(block)
    return block


def _append(self: Compiled, class_: int, block: int) -> None:
    link(self._blocks, block, self.first_end + class_)


def _oldest(self: Compiled, class_: int) -> int:
    block = self._blocks[self.first_end + class_].newer
    return block if block < self.first_end else -1


def _give_up(self: Compiled, block: int) -> None:
    record = self._blocks[block]
    unlink(self._blocks, block)
    self._gone[record.class_] += record.weight
    self._ghosts.add(block)
