"""paged_mla_decode_attention at the sizes of DeepSeek's models, and as a part of one."""

import importlib

import pytest
import torch
from op_calls import same

from kernels import concat_and_cache_mla, paged_mla_decode_attention
from kernels.testing.cases import make_case
from kernels.testing.hugging_face import import_transformers
from kernels.testing.inputs import poison_

SIZES = {"head_dim": 128, "context_lens": (75, 0, 1, 33), "dtype": torch.float16}


def make(device, num_splits, **sizes):
    sizes = SIZES | {"num_q_heads": 20, "options": {"num_splits": num_splits}} | sizes
    return make_case("paged_mla_decode_attention", **sizes, device=device)


@pytest.mark.parametrize("num_heads", [16, 40, 128])
def test_heads_of_models(num_heads, device):
    case = make(device, 2, num_q_heads=num_heads, context_lens=(70, 33))
    assert all(result.passed for result in case.judge().values())


@pytest.mark.parametrize("num_splits", [1, 3])
def test_batch_table_width_and_block_size_change_no_bit(num_splits, device):
    case = make(device, num_splits)
    out, lse = case.call()
    rows, garbage = [3, 0], torch.full((2, 9), -7, dtype=torch.int32, device=device)
    some = {name: case.inputs[name][rows] for name in ("q", "block_tables", "context_lens")}
    some["block_tables"] = torch.cat([some["block_tables"], garbage], dim=1)
    assert same(paged_mla_decode_attention(**case.inputs | some), (out[rows], lse[rows]))
    for block_size in (1, 24):
        assert same(make(device, num_splits, block_size=block_size).call(), (out, lse))
    wide = torch.zeros(4, 20, 2, 512, device=device)
    paged_mla_decode_attention(**case.inputs | {"out": wide[:, :, 1]})
    assert torch.equal(wide[:, :, 1].half(), out)
    assert not wide[:, :, 0].any()


def test_absorbed_form_gives_the_output_of_transformers(device):
    """Decode steps of a layer with random weights, in fp32. Outputs reach 0.2, errors 1e-6."""
    pytest.importorskip("transformers")
    import_transformers()
    deepseek = importlib.import_module("transformers.models.deepseek_v2.modeling_deepseek_v2")
    heads, rank, rope_dim, key_dim, value_dim, steps = 4, 512, 64, 32, 24, 40
    config = deepseek.DeepseekV2Config(
        hidden_size=64, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=None,
        kv_lora_rank=rank, qk_rope_head_dim=rope_dim, qk_nope_head_dim=key_dim,
        v_head_dim=value_dim, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    layer = deepseek.DeepseekV2Attention(config, 0).to(device).requires_grad_(False)
    x = 4 * torch.randn(2, steps, 64, device=device)  # 4: some tokens weigh more than others
    positions = torch.arange(steps, device=device)
    angles = deepseek.DeepseekV2RotaryEmbedding(config).to(device)(x, positions[None])
    mask = torch.full((steps, steps), -torch.inf, device=device).triu(1)[None, None]
    expected = layer(x, mask, position_embeddings=angles)[0]

    w_uk, w_uv = layer.kv_b_proj.weight.view(heads, -1, rank).split([key_dim, value_dim], dim=1)
    q_nope, q_pe = layer.q_proj(x).view(2, steps, heads, -1).split([key_dim, rope_dim], dim=-1)
    kv_c, k_pe = layer.kv_a_proj_with_mqa(x).split([rank, rope_dim], dim=-1)
    q_pe, k_pe = deepseek.apply_rotary_emb(q_pe.transpose(1, 2), k_pe[:, None], angles)
    q = torch.cat([torch.einsum("bthd,hdr->bthr", q_nope, w_uk), q_pe.transpose(1, 2)], dim=-1)
    kv_c, k_pe = layer.kv_a_layernorm(kv_c), k_pe[:, 0]
    cache = poison_(torch.empty(20, 7, rank + rope_dim, device=device))
    tables = torch.randperm(20).view(2, 10).to(device, torch.int32)
    slots = tables[:, positions // 7] * 7 + positions % 7
    stored = 0
    for step in range(steps - 4, steps):
        new, stored = slice(stored, step + 1), step + 1
        rows = (x[:, new].flatten(0, 1) for x in (kv_c, k_pe))
        concat_and_cache_mla(*rows, cache, slots[:, new].flatten().contiguous())
        lens = torch.full((2,), stored, dtype=torch.int32, device=device)
        latents = paged_mla_decode_attention(q[:, step], cache, tables, lens, scale=layer.scaling)
        out = layer.o_proj(torch.einsum("bhr,hvr->bhv", latents, w_uv).flatten(1))
        assert (out - expected[:, step]).abs().max() <= 1e-6
