"""``vllm_v1`` with groups of layers gives the answers of vLLM 0.33 to random operations.

    python tests/cache/managers/test_vllm_groups.py FIRST LAST [FILE]

compares over 150 operations per seed, up to the first difference.  FILE gets about 20 per seed and
vLLM's answers.  The test repeats a FILE.  experiments/overhead/baselines.py installs vLLM.
"""

import json
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache import Group, OutOfBlocks, Sequence, make_manager
from cache.managers.base import NOTHING

RECORDED = json.loads(Path(__file__).with_name("vllm_groups.json").read_text())


@pytest.mark.parametrize(("case", "steps"), RECORDED, ids=lambda item: str(item[2])[:60])
def test_answers_recorded_operations_as_vllm_did(case, steps):
    ours = Ours(*case)
    for operation, answer in steps:
        assert ours.answer(*operation) == answer, operation


class Ours:
    def __init__(self, num_blocks, block_size, groups, retention, max_chunk):
        options = {"groups": [Group(*group) for group in groups], "retention": retention}
        options |= {"num_blocks": num_blocks, "block_size": block_size}
        self.manager, self.seqs = make_manager("vllm_v1", **options), {}
        self.manager.max_in_flight_tokens = max_chunk
        self.reset = lambda _number: self.manager.reset_prefix_cache()
        self.free = lambda number: self.manager.free(self.seqs[number], is_finished=False)

    def answer(self, name, number, *arguments):
        """Call the method ``name``.  Returns its answer, the tables of the sequence ``number``, the
        number of free blocks and the free queue."""
        answer = getattr(self, name)(number, *arguments)
        manager, seq = self.manager, self.seqs.get(number)
        manager.check_invariants()
        tables = manager.block_tables(seq) if seq and seq.num_computed_tokens else []
        return [answer, tables, manager.num_free_blocks, list(manager.pool.free_blocks())]

    def add(self, number, tokens, salt):
        self.seqs[number] = Sequence(number, map(int, tokens), cache_salt=salt)

    def run(self, number, tokens, num_new, num_drafts, num_lookahead):
        """Append the generated ``tokens``, then give slots to up to ``num_new`` tokens.  Returns
        the chunk's start, junction and end, and whether enough blocks were free."""
        manager, seq, hit, fits = self.manager, self.seqs[number], NOTHING, True
        for token in tokens:
            seq.append_token(int(token))
        stored = seq.num_computed_tokens
        if number % 8 and not stored:  # the others do not read the cache
            hit = manager.find(seq)
        start, junction = stored + hit.num_tokens, hit.match[1] if hit.match else 0
        end = manager.chunk_end(seq, start, min(start + num_new, seq.num_tokens), hit)
        call, *chunk = (manager.append, seq) if stored else (manager.admit, seq, hit)
        try:
            if end > start:
                call(*chunk, end, num_drafts + num_lookahead)
        except OutOfBlocks:
            fits = False
        return [start, junction * manager.block_size, end, fits]


class VLLM:
    def __init__(self, num_blocks, block_size, groups, retention, max_chunk):
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface as kv
        from vllm.v1.core import kv_cache_manager, kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.request import Request

        kv_cache_utils.init_none_hash(sha256)
        hasher = kv_cache_utils.get_request_block_hasher(block_size, sha256)
        params = {"sampling_params": SamplingParams(), "pooling_params": None}
        self.make_request = partial(Request, **params, block_hasher=hasher)
        heads = {"num_kv_heads": 1, "head_size": 1, "dtype": None}
        spec = {
            "full": lambda _: kv.FullAttentionSpec(block_size, **heads),
            "window": lambda w: kv.SlidingWindowSpec(block_size, **heads, sliding_window=w),
            "state": lambda _: kv.MambaSpec(block_size, (), (), mamba_cache_mode="align"),
        }
        layers = [kv.KVCacheGroupSpec([kind], spec[kind](window)) for kind, window in groups]
        config = kv.KVCacheConfig(num_blocks + 1, [], layers)
        config.prefix_cache_retention_interval = retention
        self.manager = kv_cache_manager.KVCacheManager(config, 1 << 20, block_size, block_size)
        self.reset = lambda _number: self.manager.reset_prefix_cache()
        self.requests, self.chunk = {}, lambda _request, count, _hit: count
        if ["state", None] in groups:
            chunk = Scheduler._mamba_block_aligned_split  # of a scheduler whose options are off
            scheduler = SimpleNamespace(**dict.fromkeys(chunk.__code__.co_names, 0))
            scheduler.cache_config = scheduler.scheduler_config = scheduler
            scheduler.block_size, scheduler.max_num_scheduled_tokens = block_size, max_chunk or 99
            self.chunk = partial(chunk, scheduler)

    def answer(self, name, number, *arguments):
        self.manager.new_step_starts()
        answer = getattr(self, name)(number, *arguments)
        pool, tables = self.manager.block_pool, self.manager.get_block_ids(str(number))
        tables = [[block - 1 for block in table] for table in tables if table]  # 0: null block
        queue = [block.block_id - 1 for block in pool.free_block_queue.get_all_free_blocks()]
        return [answer, tables, pool.get_num_free_blocks(), queue]

    def add(self, number, tokens, salt):
        self.requests[number] = self.make_request(str(number), [*map(int, tokens)], cache_salt=salt)
        self.requests[number].skip_reading_prefix_cache = number % 8 == 0

    def run(self, number, tokens, num_new, num_drafts, num_lookahead):
        request, blocks, hit, junction = self.requests[number], None, 0, 0
        request.append_output_token_ids([*map(int, tokens)])
        if not request.num_computed_tokens:
            blocks, hit, junction = self.manager.get_computed_blocks(request)
            request.shared_prefix_boundary = junction
        start = request.num_computed_tokens + hit
        count = self.chunk(request, min(num_new, request.num_tokens - start), hit)
        new = count + num_drafts, hit, blocks, num_lookahead
        fits = not count or self.manager.allocate_slots(request, *new) is not None
        request.num_computed_tokens += hit + count if count and fits else 0
        return [start, junction, start + count, fits]

    def free(self, number):
        self.manager.free(self.requests[number])
        self.requests[number].num_computed_tokens = 0


def random_case(rng):
    """Random arguments of ``Ours`` and ``VLLM``."""
    size, windows = rng.choice([1, 2, 4]), rng.sample(range(2, 13), 2)
    groups = [["full", None]] * rng.choice([1, 1, 1, 2])
    groups += [["window", rng.choice(windows)] for _ in range(rng.choice([0, 1, 2, 2, 5]))]
    groups += [["state", None]] * rng.choice([0, 0, 1, 1, 3])
    rng.shuffle(groups)
    has_others = len(groups) > groups.count(["full", None])
    retention = rng.choice([None, 0, size * rng.randrange(1, 7) * has_others])
    return rng.randrange(6, 61), size, groups, retention, rng.choice([None, *range(1, 9)])


def random_operations(rng, case, ours, count):
    """Operations that suit the sequences in ``ours``, which runs each before the next is made."""
    num_blocks, size, groups, _, max_chunk = case
    longest = 2 + num_blocks * size // rng.choice([3, 4, 6])
    prompt = rng.choices(symbols := "012"[: rng.randrange(1, 4)], k=longest)  # all begin like it
    for new in range(count):
        running = [n for n, seq in ours.seqs.items() if seq.num_computed_tokens]
        number = rng.choice([*running * 4, *list(ours.seqs)[-3:], new, new])
        if number == new:
            own = rng.choices(symbols, k=rng.randrange(rng.choice([size, longest])) + 1)
            tokens = "".join(prompt[: rng.randrange(longest)] + own)
            yield "add", new, tokens, rng.choice([None] * 9 + ["x"])
        action, num_new = rng.random(), rng.randrange(1, 1 + (max_chunk or longest))
        if action < 0.25 and number in running:
            yield "free", number
        elif action > 0.98:
            yield from [("free", number) for number in running]
            yield "reset", None
        else:
            left, tokens = ours.seqs[number].num_tokens - ours.seqs[number].num_computed_tokens, ""
            if not left:  # a sampled token, sometimes with accepted drafts
                tokens = "".join(rng.choices(symbols, k=rng.choice([1, 1, 1, 2, 4])))
            can_draft = left + len(tokens) <= num_new and ["state", None] not in groups
            num_drafts = rng.choice([0, 0, 1, 2, 4]) if can_draft else 0
            yield "run", number, tokens, num_new, num_drafts, rng.choice([0, 0, 0, 1, 3])


def main(first, last, *files):
    records, total = [], 0
    for seed in range(int(first), int(last) + 1):
        case = random_case(rng := random.Random(seed))
        ours, theirs, steps = Ours(*case), VLLM(*case), []
        for operation in random_operations(rng, case, ours, 20 if files else 150):
            steps.append((operation, theirs.answer(*operation)))
            if (answer := ours.answer(*operation)) != steps[-1][1]:
                sys.exit("\n".join(map(str, [f"seed {seed}", case, *steps, f"ours: {answer}"])))
        total += len(steps)
        records.append(json.dumps([case, steps], separators=(",", ":")))
    for file in files:
        Path(file).write_text("[" + ",\n".join(records) + "]\n")
    print(f"{total} operations without a difference")


if __name__ == "__main__":
    main(*sys.argv[1:])
