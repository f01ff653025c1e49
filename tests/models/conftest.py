"""Tiny checkpoints, written by transformers, and what runs a model on them without the engine."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from kernels import reference
from kernels.testing.hugging_face import import_transformers
from models import LLM
from models.attention import AttentionMetadata, make_backend
from models.config import ModelConfig
from models.decoder import build_model
from models.weights import load_weights
from tests.models.tiny import CHECKPOINTS, TINY

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)  # tiny matrices: threads would only wait for each other


@pytest.fixture(scope="session")
def transformers():
    pytest.importorskip("transformers")
    return import_transformers()


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory, transformers):
    """make_checkpoint(name, **save_options) -> (folder, the transformers model in it)."""
    made = {}

    def make(name: str, **save_options):
        key = (name, *sorted(save_options.items()))
        if key not in made:
            config_class, fields = CHECKPOINTS[name]
            config = getattr(transformers, config_class)(**(TINY | fields))
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
def make_llm(make_checkpoint):
    """make_llm(name="llama", **options) -> an LLM on the checkpoint."""
    return lambda name="llama", **options: LLM(make_checkpoint(name)[0], **options)


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


@pytest.fixture
def llama_copy(make_checkpoint, tmp_path):
    """A checkpoint that a test may change."""
    return shutil.copytree(make_checkpoint("llama")[0], tmp_path / "llama")


@pytest.fixture
def text_checkpoint(llama_copy):
    """A checkpoint with a tokenizer of the words w0 to w96."""
    vocabulary = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(llama_copy / "tokenizer.json"))
    return llama_copy


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
        ids, positions, rows = [], [], []
        for i, count in enumerate(counts):
            if count:
                here = torch.arange(self.computed[i], self.computed[i] + count)
                ids.append(self.token_ids[i][here])
                positions.append(here)
                rows.append(i)
                self.computed[i] += count
        lens, positions = torch.tensor([counts[i] for i in rows]), torch.cat(positions)
        where = self.block_tables, torch.tensor(rows).repeat_interleave(lens), self.block_size
        metadata = AttentionMetadata(
            slot_mapping=reference.slot_mapping_from_positions(positions, *where),
            block_tables=self.block_tables[rows],
            cu_seqlens_q=torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int(),
            context_lens=torch.tensor([self.computed[i] for i in rows], dtype=torch.int32),
            max_seqlen_q=int(lens.max()),
            max_context_len=max(self.computed[i] for i in rows),
        )
        hidden = self.model(torch.cat(ids), positions, self.kv_cache, metadata)
        return self.model.logits(hidden)


@pytest.fixture(scope="session")
def paged_batch():
    return PagedBatch
