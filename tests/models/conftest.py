"""Tiny checkpoints, written by transformers, and what runs a model on them without the engine."""

from __future__ import annotations

import os

import pytest
import torch

from cache import MANAGERS, make_manager
from models.attention import AttentionMetadata, make_backend
from models.config import ModelConfig
from models.decoder import build_model
from models.engine import Engine, longest_sequence
from models.runner import block_row
from models.sampler import Sampler
from models.scheduler import Scheduler
from models.weights import load_weights

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)  # tiny matrices: threads would only wait for each other

_TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS = {
    "llama": ("LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "llama_biased": (
        "LlamaConfig",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
}
"""Class and fields of the configs that the tests load, by the name of the checkpoint."""


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """make_checkpoint(name, **save_options) -> (folder, the transformers model in it)."""
    made = {}

    def make(name: str, **save_options):
        key = (name, *sorted(save_options.items()))
        if key not in made:
            transformers = pytest.importorskip("transformers")
            config_class, fields = CHECKPOINTS[name]
            config = getattr(transformers, config_class)(**(_TINY | fields))
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide them
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder, **save_options)
            made[key] = (folder, model)
        return made[key]

    return make


@pytest.fixture(scope="session")
def load_model(make_checkpoint):
    """load_model(name, backend="torch", dtype=float32) -> our model with the same weights."""

    def load(name: str, backend: str = "torch", dtype: torch.dtype = torch.float32):
        folder, _ = make_checkpoint(name)
        device = torch.device("cpu")
        model = build_model(
            ModelConfig.from_folder(folder),
            make_backend(backend, device),
            dtype=dtype,
            device=device,
        )
        load_weights(model, folder)
        return model

    return load


class PagedBatch:
    """A KV cache and sequences run by hand, each with blocks of its own in random order."""

    def __init__(self, model, token_ids: list[list[int]], block_size: int, seed: int = 0) -> None:
        config = model.config
        self.model, self.block_size = model, block_size
        self.token_ids = [torch.tensor(ids) for ids in token_ids]
        self.computed = [0] * len(token_ids)
        width = max(-(-len(ids) // block_size) for ids in token_ids)
        num_blocks = width * len(token_ids)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.block_tables = order.view(len(token_ids), width).int()
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.kv_cache = torch.full((2, *shape), torch.nan)

    def step(self, counts: list[int]) -> torch.Tensor:
        """Compute the next counts[i] tokens of sequence i; the logits of all of them, in order."""
        ids, positions, slots, rows = [], [], [], []
        for i, count in enumerate(counts):
            if count:
                here = torch.arange(self.computed[i], self.computed[i] + count)
                blocks = self.block_tables[i, here // self.block_size].long()
                slots.append(blocks * self.block_size + here % self.block_size)
                ids.append(self.token_ids[i][here])
                positions.append(here)
                rows.append(i)
                self.computed[i] += count
        lens = torch.tensor([counts[i] for i in rows])
        metadata = AttentionMetadata(
            slot_mapping=torch.cat(slots),
            block_tables=self.block_tables[rows],
            cu_seqlens_q=torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int(),
            context_lens=torch.tensor([self.computed[i] for i in rows], dtype=torch.int32),
            max_seqlen_q=int(lens.max()),
            max_context_len=max(self.computed[i] for i in rows),
        )
        hidden = self.model(torch.cat(ids), torch.cat(positions), self.kv_cache, metadata)
        return self.model.logits(hidden)


@pytest.fixture(scope="session")
def paged_batch():
    return PagedBatch


class SymbolicRunner:
    """Stands in for a model: a slot holds a digest of the prefix whose K/V belong there.

    Each step checks that every sequence finds its own prefix, whatever was shared, evicted, copied
    or swapped before.  The logits that follow a prefix depend on the prefix alone.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int = 0, vocab_size: int = 13
    ) -> None:
        self.block_size, self.vocab_size = block_size, vocab_size
        self.blocks = [[None] * block_size for _ in range(num_blocks)]
        self.host_blocks = [[None] * block_size for _ in range(num_host_blocks)]
        self.steps = []

    def run(self, step, manager) -> torch.Tensor:
        self.steps.append(step)
        for device, host in step.swap_out:
            self.host_blocks[host] = self.blocks[device].copy()
        for source, destination in step.copies:
            self.blocks[destination] = self.blocks[source].copy()
        for host, device in step.swap_in:
            self.blocks[device] = self.host_blocks[host].copy()
        prefixes = []
        for seq, start, end in zip(step.sequences, step.starts, step.ends, strict=True):
            prefixes.append(self.digests(seq.token_ids[:end]))
            table = block_row(seq, manager)
            assert table.tolist() == manager.block_table(seq)
            for position in range(start, end):
                block, offset = divmod(position, self.block_size)
                self.blocks[table[block]][offset] = prefixes[-1][position]
        logits = []
        for seq, end, digests in zip(step.sequences, step.ends, prefixes, strict=True):
            table = block_row(seq, manager)
            stored = [slot for block in table for slot in self.blocks[block]][:end]
            assert stored == digests, f"{seq!r} reads K/V that are not its own"
            if end == seq.num_tokens:
                logits.append(self.logits(digests[-1]))
        return torch.stack(logits) if logits else torch.empty(0, self.vocab_size)

    @staticmethod
    def digests(token_ids) -> list[int]:
        """A number for each prefix of the tokens."""
        digest, digests = 0, []
        for token in token_ids:
            digest = hash((digest, token))
            digests.append(digest)
        return digests

    def logits(self, digest: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(digest % 2**32)
        return torch.randn(self.vocab_size, generator=generator) * 3

    def greedy(self, prompt, count: int, stops=()) -> list[int]:
        """The tokens that a greedy request must get."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count and (
            len(tokens) == len(prompt) or tokens[-1] not in stops
        ):
            tokens.append(int(self.logits(self.digests(tokens)[-1]).argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def make_engine():
    """make_engine(manager, num_blocks, block_size, ...) -> an engine over a SymbolicRunner."""

    def make(
        manager: str = "vllm_v1",
        num_blocks: int = 16,
        block_size: int = 4,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        num_host_blocks: int = 0,
        chunked_prefill: bool = True,
        max_model_len: int = 64,
        eos: frozenset[int] = frozenset(),
        **options,
    ) -> Engine:
        if MANAGERS[manager].can_swap:
            options["num_cpu_blocks"] = num_host_blocks
        scheduler = Scheduler(
            make_manager(manager, num_blocks=num_blocks, block_size=block_size, **options),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_host_blocks=num_host_blocks,
            chunked_prefill=chunked_prefill,
        )
        longest = longest_sequence(scheduler.manager, max_model_len)
        if not scheduler.chunked_prefill:
            longest = min(longest, max_num_batched_tokens)
        runner = SymbolicRunner(num_blocks, block_size, num_host_blocks)
        return Engine(
            scheduler,
            runner,
            Sampler(torch.device("cpu"), 0),
            max_model_len=longest,
            vocab_size=runner.vocab_size,
            eos_token_ids=eos,
        )

    return make


@pytest.fixture(scope="session")
def serve():
    """serve(engine) -> completions of every request by its id, once all are finished."""

    def run(engine: Engine, max_steps: int = 2000) -> dict:
        done = {}
        for _ in range(max_steps):
            if not engine.has_unfinished:
                return done
            _, finished = engine.step()
            for request in finished:
                done[request.request_id] = engine.completions(request)
        raise AssertionError(f"not finished after {max_steps} steps: {engine.requests}")

    return run


@pytest.fixture(scope="session")
def assert_idle():
    """assert_idle(engine): nothing is held, and nothing leaked."""

    def check(engine: Engine) -> None:
        assert not engine.requests
        assert not engine.scheduler.has_unfinished
        engine.manager.check_invariants()
        assert engine.manager.num_free_blocks == engine.manager.num_blocks
        num_host_blocks = len(engine.runner.host_blocks)
        assert engine.scheduler.num_free_host_blocks == num_host_blocks

    return check
