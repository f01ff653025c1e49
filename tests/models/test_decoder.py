import copy
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import reference
from kernels.add_rms_norm import _add_rms_norm_kernel
from kernels.testing.accuracy import accuracy, max_error
from models.attention import AttentionMetadata, TritonBackend
from models.config import ModelConfig
from models.decoder import build_model
from tests.models.tiny import CHECKPOINTS, LOGIT_ERROR, TINY, Fp64, SingleAdditions

LENGTHS = [23, 9, 1, 40]
RANDOM = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(97, (length,), generator=RANDOM) for length in LENGTHS]
QWEN3 = TINY | CHECKPOINTS["qwen3"][1] | {"architectures": ["Qwen3ForCausalLM"]}


class PagedBatch:
    """A KV cache and PROMPTS run by hand, each with blocks of its own in random order."""

    def __init__(self, model, block_size: int) -> None:
        config = model.config
        self.model, self.block_size = model, block_size
        self.computed = [0] * len(PROMPTS)
        width = -(-max(LENGTHS) // block_size)
        num_blocks = width * len(PROMPTS)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self.block_tables = order.view(len(PROMPTS), width).int()
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.kv_cache = torch.full((2, *shape), torch.nan)

    def step(self, counts: list[int]) -> torch.Tensor:
        """Compute the next counts[i] tokens of sequence i; the logits of all of them, in order."""
        ids, positions, rows = [], [], []
        for i, count in enumerate(counts):
            if count:
                here = torch.arange(self.computed[i], self.computed[i] + count)
                ids.append(PROMPTS[i][here])
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


@pytest.fixture(scope="module")
def judge(make_checkpoint):
    """judge(checkpoint, logits): by the fp64 rule, with transformers as the eager computation."""

    @torch.no_grad()
    def by_transformers(checkpoint):
        _, model = make_checkpoint(checkpoint)
        inputs, wide = [ids[None] for ids in PROMPTS], copy.deepcopy(model).double()
        lows = []
        for first in (0, 20, 40):  # by luck, one order alone may have a small error
            with SingleAdditions(first):
                lows.append(torch.cat([model(ids).logits[0] for ids in inputs]))
        with Fp64():
            ref = torch.cat([wide(ids).logits[0] for ids in inputs])
        assert ref.abs().max() > 1  # else the comparison would be empty
        return max(lows, key=lambda low: max_error(low, ref)), ref

    expected = functools.cache(by_transformers)

    def judge(checkpoint, logits):
        judged = accuracy(logits, *expected(checkpoint))
        assert judged.passed, judged
        assert judged.bound < LOGIT_ERROR

    return judge


CHUNKS = [[5, 8, 1, 0], [17, 1, 0, 33], [1, 0, 0, 1], [0, 0, 0, 6]]


@pytest.mark.parametrize(
    ("backend", "block_size", "steps", "checkpoint"),
    [*(("torch", size, [LENGTHS], name) for size in (1, 16) for name in CHECKPOINTS),
     *(("torch", 8, CHUNKS, name) for name in CHECKPOINTS),
     *(("triton", 7, [LENGTHS], name) for name in ("gemma2", "mistral", "qwen3"))],
)  # fmt: skip
def test_logits_are_as_close_to_fp64_as_those_of_transformers(
    checkpoint, backend, block_size, steps, load_model, judge
):
    """Of whole prompts, and of chunks and decoding."""
    assert [sum(counts) for counts in zip(*steps, strict=True)] == LENGTHS
    batch = PagedBatch(load_model(checkpoint, backend), block_size)
    logits = [batch.step(counts).split(counts) for counts in steps]
    judge(checkpoint, torch.cat([torch.cat(parts) for parts in zip(*logits, strict=True)]))


def test_the_dtype_of_the_weights_is_that_of_the_hidden_states(load_model):
    model = load_model("qwen3", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_embs[0].table.dtype == torch.float32
    batch = PagedBatch(model, 16)
    batch.kv_cache = batch.kv_cache.bfloat16()
    assert batch.step(LENGTHS).dtype == torch.bfloat16


class _Launches(TorchDispatchMode):
    """Names of the operators that launch kernels on a GPU: no views, no allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = [result.alias_info for result in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        name = func._schema.name.removeprefix("aten::")
        if not is_view and not name.startswith("empty"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


LAUNCHES = """
add_rms_norm linear rope_store_kvcache paged_decode linear
add_rms_norm linear gated_activation linear
"""


@torch.inference_mode()
def test_launches_of_a_qwen3_layer_that_decodes(monkeypatch):
    """On meta tensors, which compute nothing.  linear is one kernel on a GPU."""
    device, config = torch.device("meta"), ModelConfig.from_dict(QWEN3)
    model = build_model(config, TritonBackend(), dtype=torch.bfloat16, device=device)
    launches, kernel = _Launches(), type(_add_rms_norm_kernel)

    def launch(self, *_args, **_options):
        launches.names.append(self.fn.__name__.strip("_").removesuffix("_kernel"))

    monkeypatch.setattr(kernel, "run", launch)
    ints = torch.empty(2, 3, dtype=torch.int32, device=device)
    positions = torch.empty(2, dtype=torch.int64, device=device)
    metadata = AttentionMetadata(positions, ints, ints[0], ints[:, 0].contiguous(), 1, 48)
    x = torch.empty(2, config.hidden_size, dtype=torch.bfloat16, device=device)
    cache = torch.empty(2, 9, 16, config.num_kv_heads, config.head_dim, device=device).bfloat16()
    rotation, residual = model.model.rotary_embs[0](positions), torch.empty_like(x)
    with launches:
        model.model.layers[1](x, residual, rotation, cache, metadata)
    assert launches.names == LAUNCHES.split()
