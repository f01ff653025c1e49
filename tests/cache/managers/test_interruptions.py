"""Errors of a policy and interrupts in the middle of a change: nothing, or the manager refuses."""

import itertools
import pickle
import sys
from collections import Counter
from pathlib import Path

import pytest
from manager_helpers import CACHING, NAMES, manager_of, started, state_of, used

import cache
from cache import EvictionPolicy, InterruptedChange, OutOfBlocks, Sequence
from cache.managers import MANAGERS
from cache.policies.lru import LRU

HOOKS = {"tell", "look_up", "miss", "insert", "pin", "release", "evict"}
ERRORS = (KeyboardInterrupt, ZeroDivisionError, lambda: OutOfBlocks(2, 1))
CALLS = {
    "allocate": lambda manager, seq: manager.allocate(Sequence(9, [*range(300, 332), *range(9)])),
    "append": lambda manager, seq: manager.append(seq),
    "fork": lambda manager, seq: manager.fork(seq, seq.fork("child")),
    "free": lambda manager, seq: manager.free(seq, is_finished=False),
    "swap_out": lambda manager, seq: manager.swap_out(seq),
    "mark": lambda manager, seq: manager.mark_blocks_as_computed(seq),
}
OFFERED = {"fork": "can_fork", "swap_out": "can_swap", "mark": "can_swap"}


def hook(name: str):
    def hook(self, *arguments):
        return getattr(LRU, name)(self, *arguments)

    return hook


MANY = {name: vars(EvictionPolicy)[name] for name in ("pin_many", "release_many", "evict_many")}
Hooked = type("Hooked", (LRU,), {name: hook(name) for name in HOOKS} | MANY)
"""LRU that defines every method, each for one block at a time."""


def interrupted(error: BaseException, number: int, in_policy: bool, call, *arguments) -> str | None:
    """Raise ``error`` at line ``number`` of ``call``; returns the hook or function that got it.

    in_policy: count only lines of hooks.  None: the call has fewer lines.
    """
    folder, function = str(Path(cache.__file__).parent), None

    def interrupt(frame, event, _argument):
        nonlocal number, function
        code = frame.f_code
        if code.co_name != "hook" if in_policy else not code.co_filename.startswith(folder):
            return None
        number -= event == "line"
        if number < 0:
            function = frame.f_locals.get("name", code.co_name)
            sys.settrace(None)
            raise error
        return interrupt

    previous = sys.gettrace()
    sys.settrace(interrupt)
    try:
        call(*arguments)
    except type(error):
        return function
    finally:
        sys.settrace(previous)


def assert_refuses(manager, reason: str) -> None:
    seq = Sequence("new", range(9))
    calls = [manager.find, manager.can_allocate, manager.allocate, manager.append, manager.free]
    for call in [*calls, manager.block_table, manager.can_append]:
        with pytest.raises(InterruptedChange, match=reason) as refusal:
            call(seq)
        assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)
    with pytest.raises(AssertionError, match=reason):
        manager.check_invariants()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("name", "in_policy", "host_blocks"),
    [(name, False, 0) for name in NAMES]
    + [(name, *kind) for name in CACHING for kind in ((True, 0), (False, 40))],
)
def test_an_error_at_any_line(name, in_policy, host_blocks, call):
    offered = call not in OFFERED or getattr(MANAGERS[name], OFFERED[call])
    if not offered or (host_blocks and call == "swap_out"):
        return
    outcomes, functions = Counter(), set()
    for trial in itertools.count():
        options = {"policy": Hooked()} if in_policy else {}
        if host_blocks:
            options["host_blocks"] = host_blocks
        elif MANAGERS[name].can_swap:
            options["num_cpu_blocks"] = 20
        manager = manager_of(name, 20 if name in CACHING else 32, **options)
        used(manager, 0, range(9))
        for seq_id in range(1, 4):
            used(manager, seq_id, range(100 * seq_id, 100 * seq_id + 33))
        seq = started(manager, "live", [*range(9), 50, 51, 52])
        for token_id in range(5):
            seq.append_token(token_id)
        before, error = state_of(manager), ERRORS[trial % 3]()
        number = trial if in_policy else 3 * trial
        function = interrupted(error, number, in_policy, CALLS[call], manager, seq)
        if function is None:
            break
        functions.add(function)
        if manager.interruption:
            assert not in_policy or function not in ("tell", "look_up")
            assert_refuses(manager, f"{type(error).__name__}|an interrupt")
        else:
            manager.check_invariants()
        outcomes["refuses" if manager.interruption else state_of(manager) == before] += 1
    if in_policy:
        assert not outcomes[False]
        if call == "allocate":
            assert functions >= HOOKS - {"release", *(["look_up"] if name == "radix" else [])}
        return
    # The very end of a call is after its change; a time may be given in vain.
    assert outcomes[True] > 1
    assert outcomes["refuses"] > 1
    assert outcomes[False] <= 3
