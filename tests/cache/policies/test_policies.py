"""The contract of every policy, and the registry."""

import math
import pickle
import random
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.policies import POLICIES, EvictionPolicy, make_policy
from cache.policies.leaves import LeafPolicy
from tests.cache.prefix_traces import serve

CAPACITY = 8
OPERATIONS = ("insert", "release", "pin", "evict", "release_many", "pin_many")


def started(name: str, capacity: int = CAPACITY) -> EvictionPolicy:
    policy = make_policy(name)
    policy.start(capacity, (lambda block: block % 3) if policy.needs_future else None)
    return policy


every_policy = pytest.mark.parametrize("name", sorted(POLICIES))


@every_policy
@given(data=st.data())
def test_contract(name, data):
    """Any course of events: what is released, and only that, comes out, in the order announced."""
    policy = started(name)
    used: list[int] = []
    released: set[int] = set()
    for step in range(data.draw(st.integers(1, 60), label="steps")):
        operation = data.draw(st.sampled_from(OPERATIONS), label="operation")
        if operation == "insert" and len(used) + len(released) < CAPACITY:
            block = min(set(range(CAPACITY)) - released - set(used))
            key = data.draw(st.integers(0, 20), label="key")
            policy.miss((key, step))
            policy.insert(block, (key, step), None, len(used))
            used.append(block)
        elif operation == "release" and used:
            block = used.pop(data.draw(st.integers(0, len(used) - 1)))
            policy.release(block)
            released.add(block)
        elif operation == "release_many" and used:
            policy.release_many(reversed(used))
            released.update(used)
            used.clear()
        elif operation == "pin" and released:
            block = data.draw(st.sampled_from(sorted(released)))
            policy.pin(block)
            released.remove(block)
            used.append(block)
        elif operation == "pin_many":
            policy.pin_many(released)
            used += released
            released.clear()
        elif operation == "evict" and released:
            announced = next(iter(policy))
            assert policy.evict() == announced
            assert announced in released
            released.remove(announced)
        assert len(policy) == len(released)
        assert sorted(policy) == sorted(released)
    order = list(policy)
    assert policy.evict_many(len(released)) == order
    with pytest.raises(IndexError):
        policy.evict()


@every_policy
def test_a_call_that_fails_changes_nothing(name):
    policy = started(name)
    for block in range(4):
        policy.insert(block, block, None, block)
    policy.release_many([2, 1])
    calls = [(policy.evict_many, 3)]
    if name not in ("lru", "queue_informed"):  # lru trusts its owner: a check costs like a pin
        calls += [(policy.pin, 0), (policy.release, 1), (policy.pin, 9)]
    if name not in ("lru", "queue_informed", "random"):  # which remember nothing of blocks in use
        calls += [(policy.release, 9), (lambda block: policy.insert(block, "x", None, 0), 0)]
    order = list(policy)
    for call, argument in calls:
        with pytest.raises((IndexError, ValueError, KeyError), match=str(argument)):
            call(argument)
        assert list(policy) == order
    policy.release_many([3, 0])
    assert sorted(policy.evict_many(4)) == [0, 1, 2, 3]


def victims(policy: EvictionPolicy, keys: str) -> str:
    """Evicted contents when one-block prompts are requested in turn from a pool of three."""
    policy.start(3)
    pool: dict[str, int] = {}
    evicted = ""
    for key in keys:
        before = set(pool)
        serve(policy, pool, [key], 3)
        evicted += "".join(before - set(pool))
    return evicted


@pytest.mark.parametrize(
    ("name", "options", "keys", "expected"),
    [
        ("gdsf", {}, "aaabcdefgh", "bcdea"),  # d to g begin at the value of what went before them
        ("lru_k", {"k": 2}, "aabbccad", "a"),  # second last accesses: a 2, b 3, c 5
        ("lru_k", {"k": 3}, "aaabbccde", "bc"),  # fewer than 3 accesses: in the order of entry
        # A1in holds 1; a and b come back while remembered; b, which leaves Am, is not remembered.
        ("two_q", {"in_ratio": 0.5, "out_ratio": 1.4}, "abcdaefbagbh", "abcdebfg"),
        ("two_q", {"in_ratio": 0.5, "out_ratio": 0}, "abcdaefb", "abcda"),
        # Queues by accesses: a has four or more, b and c two or three.
        ("mq", {"num_queues": 2}, "aaaabbccd", "a"),
        ("mq", {"num_queues": 3}, "aaaabbccd", "b"),
        ("mq", {"num_queues": 2}, "aabcdef", "bcd"),
        ("mq", {"num_queues": 2, "life_time": 3}, "aabcdefg", "bcda"),  # a sinks behind d
        ("mq", {"num_queues": 2, "life_time": 2}, "aabcdef", "bca"),
        ("mq", {"num_queues": 3, "life_time": 1}, "aaaabcdefg", "bcda"),  # by a queue at a time
        # What comes back while remembered has its count again.
        ("mq", {"ghost_ratio": 1}, "abcdeafgh", "abcdef"),
        ("mq", {"ghost_ratio": 0.4}, "abcdeafgh", "abcdea"),
        ("mq", {"ghost_ratio": 0.4}, "abcdaefg", "abcde"),
        ("mq", {"ghost_ratio": 0}, "abcdaefg", "abcda"),
    ],
)
def test_victims_worked_out_by_hand(name, options, keys, expected):
    assert victims(make_policy(name, **options), keys) == expected


@every_policy
@pytest.mark.parametrize("evicts", [False, True])
def test_a_long_life_leaves_nothing_behind(name, evicts):
    """Hits, releases and evictions in any order: the state stays as large as its blocks ask."""
    rng, policy, sizes = random.Random(0), started(name, 100), []
    for block in range(100):
        policy.insert(block, block, None, 0)
    policy.release_many(range(100))
    for step in range(300):
        blocks = rng.sample(range(100), 30)  # from anywhere
        policy.pin_many(blocks)
        policy.release_many(blocks)
        if evicts:
            block, key = policy.evict(), rng.randrange(10**6)
            policy.miss(key)
            policy.insert(block, key, None, 0)
            policy.release(block)
        if step % 10 == 9:
            policy._next_use = None  # a function cannot be pickled
            sizes.append(len(pickle.dumps(policy)))
            policy._next_use = lambda block: block % 3
    assert max(sizes[15:]) < 1.3 * max(sizes[:15])
    order = list(policy)
    assert policy.evict_many(100) == order
    assert sorted(order) == list(range(100))


def test_random_draws_from_all_released_blocks():
    policy = started("random")
    for block in range(CAPACITY):
        policy.insert(block, block, None, 0)
    drawn = set()
    for _ in range(100):
        policy.release_many(range(CAPACITY))
        drawn.add(policy.evict())
        policy.pin_many(list(policy))
    assert drawn == set(range(CAPACITY))


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"random"}))
def test_unused_blocks_leave_tail_first(name):
    """Also of a prompt longer than recursion can follow."""
    length, policy = 2000, make_policy(name)
    is_tree = isinstance(policy, LeafPolicy)  # others: all blocks fit the first queue
    policy.start(length if is_tree else 16 * length, lambda block: 7)
    serve(policy, {}, [*range(length)], length)
    assert [*policy] == [*reversed(range(length))]
    assert len(policy) == length


@pytest.mark.parametrize("name", ["belady", "reuse_oracle"])
def test_bounds_without_the_future_say_so(name):
    with pytest.raises(ValueError, match=f"policy '{name}' needs the future"):
        make_policy(name).start(4)


@every_policy
def test_many_blocks_in_use_do_not_slow_eviction(name):
    """A victim is not looked for among all of those that are in use."""
    released = 300
    few, many = (calls_of_evictions(name, released, in_use) for in_use in (70, 700))
    assert many < 2 * few  # a walk for each eviction would be 630 more
    assert many < 100 * released


def calls_of_evictions(name: str, released: int, in_use: int) -> int:
    """Python and C functions called until each of ``released`` blocks has been evicted."""
    policy = started(name, released + in_use)
    for block in range(released):
        policy.insert(block, block, None, 0)
        policy.release(block)
    for _ in range(3):  # accessed again: the queue of the frequent, where there is one
        for block in range(released):
            policy.pin(block)
            policy.release(block)
    for block in range(released, released + in_use):
        policy.miss(block)
        policy.insert(block, block, None, 0)

    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        victims = [policy.evict() for _ in range(released)]
    finally:
        sys.setprofile(None)
    assert sorted(victims) == list(range(released))
    return calls


class Bare(EvictionPolicy):
    """Defines what every policy must, and no ``remove``."""

    start = pin = release = evict = __len__ = lambda *_: None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("clock", {}, "policy='clock' is unknown; choose from arc, belady, fifo"),
        ("lru", {"k": 2}, "policy 'lru' has no option k; its options: none"),
        ("lru_k", {"size": 2, "k": 2}, "policy 'lru_k' has no option size; its options: k"),
        ("two_q", {"in_ratio": 1.5}, "in_ratio must lie between 0 and 1, got 1.5"),
        ("s3fifo", {"small_ratio": 0}, "small_ratio must lie between 0 and 1, got 0"),
        ("retention", {"ranges": [(3, 3, 50)]}, "has no block"),
        ("retention", {"ranges": [(0, 3, 101)]}, "priority needs 0 to 100"),
        ("retention", {"ranges": [(0, 3, 50, -1.0)]}, "duration_ms must not be negative"),
        ("safeguarded", {"budget": -1}, "budget must be finite and not negative, got -1"),
        ("safeguarded", {"budget": math.inf}, "budget must be finite and not negative, got inf"),
        ("safeguarded", {"policy": Bare()}, r"policy 'Bare' does not define remove\(block\)"),
        ("safeguarded", {"policy": "lruu"}, "policy='lruu' is unknown"),
    ],
)
def test_unknown_names_and_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_policy(name, **options)


# Policies of a user's own, named as file.py:Class.

USER_POLICY = '''
from cache.policies import PriorityPolicy

class Deepest(PriorityPolicy):
    """Evicts the block deepest in its prompt."""

    @staticmethod
    def priority(block):
        return -block.depth

class InPlainPython(PriorityPolicy):
    def priority(self, block):
        return {"value": -block.depth}["value"]

class BeyondNumba(PriorityPolicy):
    @staticmethod
    def priority(block):
        return float(str(-block.depth).encode().decode())

class Unfinished(PriorityPolicy):
    pass

class NotANumber(PriorityPolicy):
    def priority(self, block):
        return float("nan")

class Forgotten(PriorityPolicy):
    def priority(self, block):
        block.accessed

class WantsArguments(Deepest):
    def __init__(self, size):
        self.size = size

class Raises(Deepest):
    def __init__(self):
        {}["PAGELAB_SIZE"]

class Leaves(Deepest):
    def __init__(self):
        raise SystemExit(3)
'''


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "my_policy.py"
    file.write_text(USER_POLICY)
    return file


def test_user_policy_from_a_file(user_file):
    from cache import make_workload, simulate

    trace = make_workload("rag", seed=2, num_requests=80)
    results = {
        name: simulate(trace, policy=f"{user_file}:{name}", capacity_blocks=100)
        for name in ("Deepest", "InPlainPython", "BeyondNumba")
    }
    assert len({r.hit_blocks for r in results.values()}) == 1
    assert results["Deepest"].compiled
    assert not results["InPlainPython"].compiled
    assert not results["BeyondNumba"].compiled
    assert results["Deepest"].policy == "Deepest"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{missing}:Deepest", "there is no file"),
        ("{file}:Depest", "has no eviction policy class Depest; it defines Deepest, InPlainPython"),
        ("{file}:Unfinished", "Unfinished does not define priority"),
        ("{broken}:Deepest", "importing .* failed: ZeroDivisionError"),
        ("{leaves}:Deepest", "importing .* failed: SystemExit: no policy here"),
        ("{file}:WantsArguments", "cannot be made: TypeError: .* missing 1 required .* 'size'"),
        ("{file}:Raises", "cannot be made: KeyError: 'PAGELAB_SIZE'"),
        ("{file}:Leaves", "cannot be made: SystemExit: 3"),
    ],
)
def test_bad_user_files(user_file, tmp_path, spec, message):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    leaves = tmp_path / "leaves.py"
    leaves.write_text("import sys\nsys.exit('no policy here')\n")
    missing = tmp_path / "missing.py"
    spec = spec.format(file=user_file, missing=missing, broken=broken, leaves=leaves)
    with pytest.raises(ValueError, match=f"'{re.escape(spec)}'.*{message}"):
        make_policy(spec)


@pytest.mark.parametrize(("name", "value"), [("NotANumber", "nan"), ("Forgotten", "None")])
def test_a_priority_that_is_not_a_number_is_refused(user_file, name, value):
    policy = started(f"{user_file}:{name}")
    policy.insert(0, "a", None, 0)
    with pytest.raises(ValueError, match=f"'{name}': the priority of block 0 is {value}, not"):
        policy.release(0)
    assert len(policy) == 0
