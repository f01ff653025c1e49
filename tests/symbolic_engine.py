"""An engine whose model is a stand-in that checks every slot which a sequence reads."""

import math
import random
import zlib

from cache import MANAGERS, Sequence, make_manager
from cache.blocks.hashing import BlockHasher
from cache.serving.engine import Engine
from cache.serving.request import ScheduledSequence
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler, Step

VOCAB_SIZE = 13
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * i + i // 3) % VOCAB_SIZE for i in range(length)]


class SymbolicDrawn:
    """Sampled tokens, visible only to the runner until they are read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.is_read = tokens, False

    def read(self) -> list[int]:
        self.is_read = True
        return self.tokens


def known_tokens(seq: ScheduledSequence, step: Step) -> list[int]:
    """Tokens of a sequence, with its unread token from the last step's samples."""
    tokens = seq.token_ids.tolist()
    if seq.pending_row is not None:
        assert not step.drawn.is_read
        tokens[-1] = step.drawn.tokens[seq.pending_row]
    return tokens


def keys_of(seq: ScheduledSequence) -> dict:
    return {"lora_name": seq.lora_name, "cache_salt": seq.cache_salt}


def assert_hashes_are_of_known_tokens(seq: ScheduledSequence) -> None:
    known = seq.token_ids[: seq.num_tokens - seq.num_unknown_tokens]
    for (*name, group), chain in seq.hash_chains.items():
        whole = Sequence(0, known, mm_inputs=seq.mm_inputs, **keys_of(seq))
        expected = BlockHasher(*name).block_hashes(whole, group)
        assert chain == expected[: len(chain)]


class Injected(Exception):
    """An error of a runner or a sampler."""


class SymbolicRunner:
    """Stands in for a model: a slot holds a digest of the prefix whose K/V belong there.

    Each step checks that every sequence finds its own prefix, whatever was shared, evicted, copied
    or swapped before.  The logits that follow a prefix depend on the prefix, the salt and the
    adapter alone.  ``fails``: the next step raises.
    """

    fails = False

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.blocks = [[None] * block_size for _ in range(num_blocks)]
        self.host_blocks = [[None] * block_size for _ in range(num_host_blocks)]
        self.steps: list[Step] = []

    def run(self, step: Step, manager) -> list[list[float]]:
        self.steps.append(step)
        if self.fails:
            self.fails = False
            raise Injected
        for pairs in (step.swap_out, step.swap_in):
            assert len({destination for _, destination in pairs}) == len(pairs)
        for device, host in step.swap_out:
            self.host_blocks[host] = self.blocks[device].copy()
        for source, destination in step.copies:
            self.blocks[destination] = self.blocks[source].copy()
        for host, device in step.swap_in:
            self.blocks[device] = self.host_blocks[host].copy()
        assert not (step.preempted and step.admitted)
        for seq in (*step.sequences, *step.preempted):
            assert_hashes_are_of_known_tokens(seq)
        logits, reads = [], []
        for seq, count in zip(step.sequences, step.counts, strict=True):
            tokens = known_tokens(seq, step)[: seq.num_computed_tokens]
            digests = self.digests(tokens, **keys_of(seq))
            assert 0 < count <= seq.num_computed_tokens == len(digests)
            tables = zip(manager.groups, manager.block_tables(seq), strict=True)
            for number, (group, table) in enumerate(tables):
                own = [digest + number for digest in digests]
                new = len(own) - count
                first = 0 if group.window is None else max(0, new - group.window + 1)
                if group.kind == "state":  # read it, then replace it
                    block, offset = divmod(new - 1, self.block_size)
                    assert not new or self.blocks[table[block]][offset] == own[new - 1]
                    first = new = len(own) - 1
                    self.blocks[table[new // self.block_size]] = [None] * self.block_size
                for position in range(new, len(own)):
                    block, offset = divmod(position, self.block_size)
                    self.blocks[table[block]][offset] = own[position]
                reads.append((seq, table, first, own))
            if len(digests) == seq.num_tokens:
                logits.append(self.logits(digests[-1]))
        for seq, table, first, own in reads:  # after the writes of all sequences
            slots = [slot for block in table for slot in self.blocks[block]]
            read = slots[first : len(own)]
            assert read == own[first:], f"{seq!r} reads K/V that are not its own"
        return logits

    @staticmethod
    def digests(token_ids, lora_name=None, cache_salt=None) -> list[int]:
        """A number for each prefix of the tokens."""
        digest, digests = zlib.crc32(f"{lora_name!r} {cache_salt!r}".encode()), []
        for token in token_ids:
            digest = hash((digest, token))
            digests.append(digest)
        return digests

    @staticmethod
    def logits(digest: int) -> list[float]:
        generator = random.Random(digest)
        return [generator.gauss(0, 3) for _ in range(VOCAB_SIZE)]

    def greedy(self, prompt, count: int, stops=(), **keys) -> list[int]:
        """The tokens that a greedy request must get."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count and (
            len(tokens) == len(prompt) or tokens[-1] not in stops
        ):
            logits = self.logits(self.digests(tokens, **keys)[-1])
            tokens.append(logits.index(max(logits)))
        return tokens[len(prompt) :]


class SymbolicSampler:
    """Greedy, or by noise that depends on seed, output and position alone.

    faults: by request, "nan" for logits that are not finite, "error" to raise.
    """

    def __init__(self) -> None:
        self.faults: dict[int, str] = {}

    def is_nan(self, seq: ScheduledSequence) -> bool:
        fault = self.faults.get(seq.request.request_id)
        if fault == "error":
            raise Injected
        return fault == "nan"

    def draw(self, logits, rows: list[int], sequences: list[ScheduledSequence]) -> SymbolicDrawn:
        tokens = []
        for row, seq in zip(rows, sequences, strict=True):
            params = seq.request.params
            scores = logits[row]
            if params.temperature:
                noise = random.Random(f"{params.seed} {seq.index} {seq.num_output_tokens}")
                scores = [
                    score / params.temperature - math.log(noise.expovariate(1)) for score in scores
                ]
            tokens.append(-1 if self.is_nan(seq) else scores.index(max(scores)))
        return SymbolicDrawn(tokens)

    def topk_logprobs(self, logits, row: int, seq, count: int) -> list[tuple[float, int]]:
        if self.is_nan(seq):
            return []
        total = math.log(sum(map(math.exp, logits[row])))
        ranked = sorted(range(VOCAB_SIZE), key=lambda token: -logits[row][token])
        return [(logits[row][token] - total, token) for token in ranked[:count]]


def make_engine(
    manager: str = "vllm_v1",
    num_blocks: int = 16,
    block_size: int = 4,
    *,
    num_host_blocks: int = 0,
    max_model_len: int = 64,
    eos: frozenset[int] = frozenset(),
    overlap: bool = False,
    scheduling: str = "fcfs",
    **options,
) -> Engine:
    """An engine on a SymbolicRunner; ``options``: options of scheduler and manager."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    limits |= {"chunked_prefill": True, "prefill_first": False}
    limits = {name: options.pop(name, default) for name, default in limits.items()}
    if MANAGERS[manager].can_swap:
        options["num_cpu_blocks"], num_host_blocks = num_host_blocks, 0
    kv_cache = make_manager(manager, num_blocks=num_blocks, block_size=block_size, **options)
    limits |= {"policy": scheduling, "num_host_blocks": num_host_blocks}
    scheduler = Scheduler(kv_cache, **limits)
    num_host_blocks = num_host_blocks or options.get("num_cpu_blocks") or kv_cache.num_host_blocks
    runner = SymbolicRunner(num_blocks, block_size, num_host_blocks)
    longest = scheduler.longest_sequence(max_model_len)
    tokens = {"vocab_size": VOCAB_SIZE, "eos_token_ids": eos}
    return Engine(
        scheduler, runner, SymbolicSampler(), max_model_len=longest, overlap=overlap, **tokens
    )


def serve(engine: Engine, max_steps: int = 2000) -> dict:
    """Completions of every request by its id, once all are finished."""
    done = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return done
        _, finished = engine.step()
        for request in finished:
            done[request.request_id] = engine.completions(request)
    raise AssertionError(f"not finished after {max_steps} steps: {engine.requests}")


def assert_idle(engine: Engine) -> None:
    """Nothing is held, and nothing leaked."""
    assert not engine.requests
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    engine.manager.check_invariants()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    manager, num_host_blocks = engine.manager, len(engine.runner.host_blocks)
    if manager.tier is None:
        cpu = getattr(manager, "cpu", None)  # of a manager that swaps
        free = cpu.num_free_blocks if cpu else len(engine.scheduler.free_host_blocks)
        assert free == num_host_blocks
        return
    manager.take_transfers()  # of the last step's blocks
    manager.take_transfers()
    assert manager.tier.pool.num_free_blocks == num_host_blocks
    manager.check_invariants()
