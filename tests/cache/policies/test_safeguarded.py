"""The bound of ``safeguarded`` on how far a policy falls below LRU, against designed traces."""

import itertools
import random
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache import AllocStatus, Sequence
from cache.policies import EvictionPolicy, make_policy
from cache.policies.gittins import Gittins
from cache.traces.trace import Trace
from tests.cache.prefix_traces import hits, prefix_traces, serve, trace_of
from tests.cache.replay.test_serial import in_python


def slack(trace: Trace, capacity: int, policy: EvictionPolicy, budget: float) -> float:
    """Least distance to the bound after any request, in hits; negative: it was broken."""
    lru, ours = (np.cumsum(hits(trace, one, capacity)) for one in ("lru", policy))
    return (ours - lru + budget * trace.offsets[1:]).min()


def adversary(
    capacity: int, size: int, repeats: int, warm: int, output: int = 1000, rounds: int = 15
) -> Trace:
    """Prompts of ``size`` blocks against a policy that learns from uses and output lengths.

    Each round makes prompts that are used often and never again, and so are kept too long.  When
    LRU is about to evict the oldest prompt that was used once, it returns with new blocks behind
    it.  ``warm`` requests for one prompt fill the balance first.
    """
    lru, used_once, requests, ids = OrderedDict(), {}, [], itertools.count()

    def fresh(count: int) -> list[int]:
        return list(itertools.islice(ids, count))

    def request(path: list[int], output: int) -> None:
        requests.append((1000.0 * len(requests), 16 * len(path), output, path))
        for block in reversed(path):
            lru[block] = None
            lru.move_to_end(block)
        while len(lru) > capacity:
            lru.popitem(last=False)

    hot = fresh(size)
    for _ in range(warm):
        request(hot, 10)
    for _ in range(rounds):
        hot = fresh(size)
        for _ in range(repeats):
            request(hot, 10)
        while True:
            oldest = used_once.get(next(iter(lru)))
            if hot[0] not in lru and oldest and all(block in lru for block in oldest):
                break
            single = hot[0] not in lru and oldest
            prompt = fresh(1 if single else size)
            used_once.update(dict.fromkeys(prompt, None if single else prompt))
            request(prompt, output)
        request(oldest + fresh(size), output)
    return Trace.from_requests(requests, name="adversary", block_size=16)


DESIGNED = [
    (capacity, int(share * capacity), repeats, warm)
    for capacity, share, repeats, warm in itertools.product((30, 100), (0.2, 0.5), (2, 8), (0, 200))
] + [(200, 80, 4, 200)]  # where an earlier policy lost 6.2 % of all references


def test_the_bound_holds_on_every_designed_trace():
    """In Python: compiling takes seconds a policy, and test_serial.py compares with compiled."""
    for design in DESIGNED:
        trace, capacity = adversary(*design), design[0]
        for wrapped, budget in (("gdsf", 0.0), ("gdsf", 0.005), ("gittins", 0.005)):
            policy = in_python("safeguarded", policy=wrapped, budget=budget)
            assert slack(trace, capacity, policy, budget) >= -1e-9, (design, wrapped, budget)
        assert slack(trace, capacity, in_python("gdsf"), 0.005) < 0, "it is tempted"


POLICIES = [
    "gittins", "mru", "filo", "lfu", "random", "random_leaf", "arc", "mq", "sieve", "retention",
]  # fmt: skip
"""One per family at least; MRU, FILO and LFU are far below LRU and evict inner blocks."""


@pytest.mark.parametrize("name", POLICIES)
@given(trace=prefix_traces, capacity=st.integers(1, 12), budget=st.sampled_from([0, 0.02, 0.3]))
def test_the_bound_holds_for_every_kind_of_policy(name, trace, capacity, budget):
    policy = in_python("safeguarded", policy=name, budget=budget)
    assert slack(trace, capacity, policy, budget) >= -1e-9


@pytest.mark.parametrize("budget", [0.02, 0.2])
@pytest.mark.parametrize("name", POLICIES)
def test_the_bound_holds_against_requests_for_what_is_missing(name, budget):
    """After the balance is filled; that can cost the capacity.  The adversary sees the policy."""
    capacity, size = 24, 4
    generator = np.random.default_rng(0)
    policy, lru = make_policy("safeguarded", policy=name, budget=budget), make_policy("lru")
    policy.start(capacity)
    lru.start(capacity)
    pools = {policy: {}, lru: {}}  # content to block
    lead, most, most_missing, prompts = 0, 0, 0, []
    for at in range(-100, 400):
        missing = [p for p in prompts if p[-1] in pools[lru] and p[-1] not in pools[policy]]
        most_missing = max(most_missing, len(missing))
        if missing:
            path = missing[0]
        elif prompts and (at < 0 or at % 3):
            path = prompts[generator.integers(len(prompts))]
        else:
            path = [f"{at}.{depth}" for depth in range(size)]
            prompts.append(path)
        ours, theirs = (serve(one, pools[one], path, capacity) for one in (policy, lru))
        lead += ours - theirs + budget * size
        most = max(most, lead)
        assert lead >= max(0, most - capacity) - 1e-9
    assert most_missing or name == "gittins", "it was tempted"


@pytest.mark.parametrize("design", ["vllm_v1", "nano_vllm", "vllm_v0"])
@pytest.mark.parametrize("wrapped", ["gittins", "mru"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_bound_holds_in_a_manager(design, wrapped, overlap):
    """Half of the prompts are chosen for what LRU holds and the pool does not; they are chunked.

    One at a time, outputs and last blocks repeat.  Where requests overlap they are unique.
    """
    draw, budget = random.Random(0), 0.02
    for size, num_blocks in [(1, 9), (2, 5), (2, 8), (3, 12)] * 4:
        policy = make_policy("safeguarded", policy=wrapped, budget=budget)
        options = {"num_blocks": num_blocks, "block_size": size}
        managers = [cache.make_manager(design, policy=one, **options) for one in (policy, "lru")]
        running, known, room = [], [[0]], num_blocks * size
        for number in range(50):
            prompt, output = draw.choices((0, 1), k=draw.randint(1, room)), [0, 1] * size
            if draw.random() < 0.5:
                found = [[m.find(Sequence(-1, p)).num_tokens for m in managers] for p in known]
                prompt = max(zip(found, known, strict=True), key=lambda it: it[0][1] - it[0][0])[1]
                prompt = prompt[: draw.randint(1, room)]
            if overlap:
                prompt, output = [*prompt[:-1], 2 + number], [2 + number] * size
            whole = Sequence(number, (prompt + output[draw.randrange(2 * size) :])[:room])
            known = [*known[-7:], whole.token_ids.tolist()]
            while running and not (overlap and managers[0].can_allocate(whole) is AllocStatus.OK):
                for manager, seq in running.pop(draw.randrange(len(running))):
                    manager.free(seq)
            step = draw.randint(1, len(prompt)) if managers[0].can_chunk else len(prompt)
            running.append([(manager, Sequence(number, prompt)) for manager in managers])
            for manager, seq in running[-1]:
                hit = manager.find(seq)
                manager.admit(seq, hit, min(hit.num_tokens + step, len(prompt)))
                while seq.num_computed_tokens < len(prompt):
                    manager.append(seq, min(seq.num_computed_tokens + step, len(prompt)))
                for token in whole.token_ids[len(prompt) :]:
                    seq.append_token(token)
                    manager.append(seq)
            assert policy._missing.keys() == policy._lru.keys() - policy._with_key.keys()
            ours, lru = managers
            if design == "vllm_v0" and overlap:
                continue
            lead = ours.stats.hit_blocks - lru.stats.hit_blocks
            assert lead >= len(policy._missing) - budget * lru.stats.queried_blocks - 1e-9
            held = lru.gpu.keys if design == "vllm_v0" else lru.pool.block_hashes
            followed = policy._lru.keys() | policy._in_use.keys()
            assert followed >= {key for key in held if isinstance(key, bytes)}
        managers[0].check_invariants()
        for manager, seq in itertools.chain(*running):
            manager.free(seq)
        if managers[0].can_reset:
            assert managers[0].reset_prefix_cache()
            assert not len(policy)


def test_what_was_set_aside_first_goes_first():
    policy = make_policy("safeguarded", policy="mru", budget=0)
    for pool in ({}, {}):  # a start forgets all
        policy.start(4)
        for leaf in "abc":
            serve(policy, pool, ["root", leaf], 4)
        policy.look_up("def")  # LRU keeps only the root; MRU gives up c, then the root with a and b
        assert [policy.evict() for _ in "def"] == [pool[leaf] for leaf in "cab"]
        for block in range(4, 9):  # an owner may use more blocks than the capacity
            policy.insert(block, block, None, 0)


class WrongVictim(Gittins):
    def evict(self) -> int:
        return super().evict() + 1000


class Forgetful(cache.policies.POLICIES["fifo"]):
    """Gives up the same block again and again."""

    def evict(self) -> int:
        return min(self)


@pytest.mark.parametrize("wrapper", ["safeguarded", "queue_informed"])
@pytest.mark.parametrize(("wrapped", "victim"), [(WrongVictim, r"\d+"), (Forgetful, "0")])
def test_a_wrong_victim_of_the_wrapped_policy_is_named(wrapper, wrapped, victim):
    policy, trace = make_policy(wrapper, policy=wrapped()), trace_of([(at,) for at in range(5)])
    message = f"policy '{wrapped.__name__}': .* gave {victim}, not a released"
    with pytest.raises(RuntimeError, match=message):
        cache.simulate(trace, policy=policy, capacity_blocks=2)
