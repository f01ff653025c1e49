"""Ops that work token by token: norms, activations, rotations, slots and sampling."""

import torch
from torch import ones, zeros

from kernels.testing.inputs import random_paged_batch
from kernels.testing.op import HALF, Case, Lens, Op, Sizes, by_head_dim, each
from kernels.testing.ops.stores import BAD_ROTARY, ROTARY_DIMS


def _add_rms_norm(s: Sizes) -> Case:
    random = s.random()
    width = s.width or s.num_q_heads * s.head_dim
    x, residual = random.normal(s.num_tokens, 2 * width, dtype=s.dtype).chunk(2, dim=1)
    adds = "alone" not in s.features
    weight = random.normal(width, dtype=s.dtype)
    inputs = {"x": x, "residual": residual if adds else None, "weight": weight}
    return Case(
        "add_rms_norm",
        inputs | {"offset": float("offset" in s.features)},
        num_bytes=(2 + 2 * adds) * x.numel() * x.itemsize + weight.nbytes,
        flops=(4 + adds) * x.numel(),
        writes=("residual",) if adds else (),
    )


def _gated_activation(s: Sizes) -> Case:
    width = s.width or 3 * s.num_q_heads * s.head_dim
    gate, up = s.random().normal(s.num_tokens, 2 * width, dtype=s.dtype).chunk(2, dim=1)
    activation = "gelu_pytorch_tanh" if "gelu" in s.features else "silu"
    return Case(
        "gated_activation",
        {"gate": gate, "up": up, "activation": activation},
        num_bytes=3 * gate.numel() * gate.itemsize,
        flops=8 * gate.numel(),
    )


def _apply_rotary_embedding(s: Sizes) -> Case:
    random = s.random()
    num_heads = s.num_q_heads + 2 * s.num_kv_heads
    x = random.normal(s.num_tokens, num_heads, s.head_dim, dtype=s.dtype)[:, : s.num_q_heads]
    table_bytes, flops = s.rotary_cost(s.num_q_heads)
    return Case(
        "apply_rotary_embedding",
        {"x": x, **s.rotary_tables(random), "interleaved": "interleaved" in s.features},
        num_bytes=2 * x.numel() * x.itemsize + table_bytes,
        flops=flops,
    )


def _slot_mapping_from_positions(s: Sizes) -> Case:
    batch = random_paged_batch(s.context_lens, **s.paged)
    positions = torch.tensor([p for n in s.context_lens for p in range(n)], dtype=torch.int64)
    if s.padded:
        positions[::7] = -1
    lens = torch.tensor(s.context_lens, dtype=torch.int64)
    seqs = torch.arange(len(lens)).repeat_interleave(lens)
    inputs = {"positions": positions.to(s.device), "block_tables": batch.block_tables}
    return Case(
        "slot_mapping_from_positions",
        inputs | {"seq_ids": seqs.to(s.device), "block_size": s.block_size},
        num_bytes=24 * len(positions) + s.table_bytes(s.context_lens),
    )


def _sample_tokens(s: Sizes) -> Case:
    rows, device = s.num_tokens, s.device
    logits = s.random().normal(rows, s.vocab_size, dtype=s.dtype)
    inputs = {"logits": logits}
    if "greedy" not in s.features:
        temperatures = (torch.arange(rows) / 4).to(device)  # the first row is greedy
        inputs |= {"temperatures": temperatures, "noise_seeds": torch.arange(rows).to(device)}
    if "min_p" in s.features:
        inputs["min_ps"] = (torch.arange(rows) % 3 / 10).to(device)
    if "top_k" in s.features:
        inputs["top_ks"] = (torch.arange(rows) % 3 * 20 + 1).to(device)
    if "top_p" in s.features:
        inputs["top_ps"] = (1 - torch.arange(rows) % 3 / 10).to(device)
    beside = sum(x.nbytes for x in inputs.values() if x is not logits)
    num_bytes = logits.nbytes + beside + 8 * rows
    return Case("sample_tokens", inputs, num_bytes=num_bytes, returns=("tokens",))


_RESTRICTED = ("min_p", "top_k", "top_p")
_SAMPLED = ("temperatures", "noise_seeds", "min_ps", "top_ks", "top_ps")
OPS = {
    "add_rms_norm": Op(
        case=_add_rms_norm,
        features=("alone", "offset"),  # alone: without a residual
        has_blocks=False,
        drawn={
            "width": (1, 7, 64, 100, 1000, 1024, 2560, 5120), "eps": (0.0, 1e-6, 1e-5, 0.1)
        },
        scaled=("x", "residual"),
        executed=({"width": 1000}, {"width": 2560}),
        tiny={"width": 48},
        ranges={"eps": (0, None), "offset": (None, None)},
        bad_calls=(
            ("residual: ...num_tokens=4, hidden_size=48), got (4, 1)", {"residual": zeros(4, 1)}),
            (
                "x: expected hidden_size from 0 to 32768, got 40000",
                {"x": ones(1, 40000), "residual": None, "weight": ones(40000)},
            ),
        ),
        # Hidden sizes of models from 0.6B to 70B, and the widest row in use.
        shipped=each(HALF, {
            " ".join((f"h{size}", *features)): {"width": size, "features": features}
            for size in (1024, 2560, 4096, 5120, 8192, 16384)
            for features in ((), ("alone",))
        }),
        guarded=dict.fromkeys(("sm_80", "sm_90"), "bf16 h5120$|bf16 h16384"),
        timed={"norm": {}},
    ),
    "gated_activation": Op(
        case=_gated_activation,
        features=("gelu",),
        has_blocks=False,
        drawn={"width": (1, 7, 80, 1024, 2048, 2049, 5000)},
        scaled=("gate",),
        executed=({"width": 2600},),
        tiny={"width": 48},
        ranges={},
        bad_calls=(
            ("activation: expected silu or gelu_pytorch_tanh, got 'relu'", {"activation": "relu"}),
            ("activation: expected silu or gelu_pytorch_tanh, got None", {"activation": None}),
        ),
        # Halves of a fused projection, in the widths of Qwen3 8B, Gemma 2 9B and Qwen 2.5 7B.
        shipped=each(HALF, {
            "i12288 silu": {"width": 12288},
            "i14336 gelu": {"width": 14336, "features": ("gelu",)},
            "i18944 silu": {"width": 18944},
        }),
        guarded=dict.fromkeys(("sm_80", "sm_90"), "bf16 i18944"),
        timed={"gate": {}},
    ),
    "apply_rotary_embedding": Op(
        case=_apply_rotary_embedding,
        features=("interleaved",),
        has_blocks=False,
        drawn={"rotary_dim": ROTARY_DIMS},
        executed=({}, {"head_dim": 80, "rotary_dim": 40}),
        ranges={"positions": (0, 8)},
        free_dims=frozenset({("x", 1), ("x", 2)}),
        bad_calls=BAD_ROTARY,
        shipped=by_head_dim(HALF, ("interleaved",)),
    ),
    "slot_mapping_from_positions": Op(
        case=_slot_mapping_from_positions,
        is_exact=True,
        drawn={"context_lens": Lens(300, 4)},
        executed=({"context_lens": (20, 9)},),
        tiny={"context_lens": (1, 1)},
        ranges={
            "block_size": (1, None), "positions": (None, 11), "seq_ids": (0, 1),
            "block_tables": (None, None),
        },
        free_dims=frozenset({("block_tables", 0), ("block_tables", 1)}),
        shipped={"b16": {"context_lens": (128,) * 64}},
    ),
    "sample_tokens": Op(
        case=_sample_tokens,
        features=("greedy", *_RESTRICTED),
        has_blocks=False,
        is_exact=True,
        drawn={"vocab_size": range(1, 4501), "num_tokens": range(1, 4)},
        executed=({"num_tokens": 3},),
        tiny={"num_tokens": 2, "vocab_size": 9, "features": _RESTRICTED},
        ranges={"temperatures": (0, 1e29), "min_ps": (0, 1), "top_ks": (1, None), "top_ps": (0, 1)},
        free_dims=frozenset({("logits", 1)}),
        bad_calls=(
            ("logits: expected vocab_size from 1 to 4194304, got 0", {"logits": ones(2, 0)}),
            ("noise_seeds: expected temperatures and noise_seeds together", {"noise_seeds": None}),
            ("noise_seeds: expected temperatures and noise_seeds together", {"temperatures": None}),
            *(
                (f"{name}: expected with temp", {one: None for one in _SAMPLED if one != name})
                for name in _SAMPLED[2:]
            ),
        ),
        shipped=each((*HALF, torch.float32), {
            " ".join(("v128256", *features)): {"num_tokens": 64, "features": features}
            for features in ((), ("greedy",), ("min_p",), _RESTRICTED)
        }),
        guarded=dict.fromkeys(("sm_90", "sm_100"), "bf16 v128256( min_p)?$"),
    ),
}  # fmt: skip
