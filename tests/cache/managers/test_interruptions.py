"""Errors of a policy and interrupts in the middle of a change: nothing, or the manager refuses."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from manager_helpers import CACHING, NAMES, manager_of, started, state_of, used

import cache
from cache import EvictionPolicy, InterruptedChange, OutOfBlocks, Sequence
from cache.policies.lru import LRU

HOOKS = ("tell", "look_up", "miss", "insert", "pin", "release", "evict")


def raising(hook: str, count: int, error: BaseException) -> EvictionPolicy:
    """LRU whose ``hook`` raises ``error`` in its call number ``count``."""
    calls = []

    def method(self, *arguments):
        calls.append(hook)
        if len(calls) == count:
            raise error
        return getattr(LRU, hook)(self, *arguments)

    many = ("pin_many", "release_many", "evict_many")
    return type(
        "Raising", (LRU,), {hook: method, **{name: vars(EvictionPolicy)[name] for name in many}}
    )()


def random_calls(manager, generator: random.Random):
    live: list[Sequence] = []
    for number in range(200):
        if not live or generator.random() < 0.5:
            seq = Sequence(number, generator.choices(range(2), k=generator.randrange(1, 30)))
            yield lambda seq=seq: (manager.allocate(seq), live.append(seq))
        elif generator.random() < 0.5:
            seq = generator.choice(live)
            seq.append_token(generator.randrange(2))
            yield lambda seq=seq: manager.append(seq)
        else:
            seq = live.pop(generator.randrange(len(live)))
            yield lambda seq=seq: manager.free(seq)


def assert_refuses(manager, reason: str) -> None:
    seq = Sequence("new", range(9))
    calls = [manager.find, manager.can_allocate, manager.allocate, manager.append, manager.free]
    for call in [*calls, manager.block_table, manager.can_append]:
        with pytest.raises(InterruptedChange, match=reason):
            call(seq)
    with pytest.raises(AssertionError, match=reason):
        manager.check_invariants()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, lambda: OutOfBlocks(2, 1)])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", CACHING)
def test_a_policy_that_raises(name, hook, error):
    if (name, hook) == ("radix", "look_up"):
        return
    is_atomic, num_raised, error = hook in ("tell", "look_up"), 0, error()
    for count, seed in [(count, seed) for count in (1, 2, 3, 5, 8) for seed in range(3)]:
        manager = manager_of(name, 12, 2, policy=raising(hook, count, error))
        for call in random_calls(manager, random.Random(seed)):
            before = is_atomic and state_of(manager)
            try:
                call()
            except BaseException as raised:
                if raised is not error:  # out of blocks
                    continue
                num_raised += 1
                if is_atomic:
                    assert state_of(manager) == before
                    manager.check_invariants()
                else:
                    assert_refuses(manager, type(error).__name__)
                break
    assert num_raised


CALLS = {
    "allocate": lambda manager, seq: manager.allocate(Sequence(9, [*range(8), *range(70, 80)])),
    "append": lambda manager, seq: manager.append(seq),
    "fork": lambda manager, seq: manager.fork(seq, seq.fork("child")),
    "free": lambda manager, seq: manager.free(seq, is_finished=False),
    "swap_out": lambda manager, seq: manager.swap_out(seq),
    "mark": lambda manager, seq: manager.mark_blocks_as_computed(seq),
}
OFFERED = {"fork": "can_fork", "swap_out": "can_swap", "mark": "can_swap"}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_at_any_line(name, call):
    outcomes = Counter()
    for number in range(0, 1000, 3):
        manager = manager_of(name, 32, **({"num_cpu_blocks": 32} if name == "vllm_v0" else {}))
        if call in OFFERED and not getattr(manager, OFFERED[call]):
            return
        used(manager, 0, range(9))
        for seq_id in range(1, 4):
            used(manager, seq_id, range(100 * seq_id, 100 * seq_id + 33))
        seq = started(manager, "live", [*range(9), 50, 51, 52])
        for token_id in range(5):
            seq.append_token(token_id)
        before, left = state_of(manager), number

        def interrupt(frame, event, _argument):
            nonlocal left
            if not frame.f_code.co_filename.startswith(str(Path(cache.__file__).parent)):
                return None
            left -= event == "line"
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        previous = sys.gettrace()
        sys.settrace(interrupt)
        try:
            CALLS[call](manager, seq)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(previous)
        if manager.interruption:
            assert_refuses(manager, "KeyboardInterrupt|an interrupt")
        else:
            manager.check_invariants()
        outcomes["refuses" if manager.interruption else state_of(manager) == before] += 1
    # The very end of a call is after its change; a time may be given in vain.
    assert outcomes[True] > 1
    assert outcomes["refuses"] > 1
    assert outcomes[False] <= 3
