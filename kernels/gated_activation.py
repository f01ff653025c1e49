"""The gate of a decoder's MLP: activation(gate) * up, SwiGLU or GeGLU (Shazeer, 2020).

Gate and up may be the two halves of a fused projection's rows (vLLM's silu_and_mul). The activated
gate is never written to memory. The op computes in fp32 and rounds once.
"""

import torch
import triton
import triton.language as tl

from kernels.checks import FLOAT_DTYPES, Arg, TensorSpec, same_dtype
from kernels.launch import launch, op
from kernels.primitives import LOG2_E, await_launches_before, cast, tanh
from kernels.tiles import activation_tile, cdiv, pdl_options

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Names in Hugging Face configs: SiLU (Llama, Qwen), and GELU approximated with tanh (Gemma)."""
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_TENSORS = TensorSpec(
    Arg("gate", "num_tokens intermediate_size", FLOAT_DTYPES),
    Arg("up", "num_tokens intermediate_size", same_dtype("gate")),
)


@triton.jit
def _gated_activation_kernel(
    out_ptr, gate_ptr, up_ptr, stride_gate, stride_up,
    SIZE: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: TILE elements of a row."""
    await_launches_before(PDL)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    TILES: tl.constexpr = (SIZE + TILE - 1) // TILE
    program = tl.program_id(0)
    row = (program // TILES).to(tl.int64)
    offs = program % TILES * TILE + tl.arange(0, TILE)
    mask = offs < SIZE
    gate = tl.load(gate_ptr + row * stride_gate + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + offs, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate / (1.0 + tl.exp2(gate * -LOG2_E))
    else:
        inner = gate * SQRT_2_OVER_PI * (1.0 + 0.044715 * gate * gate)
        activated = 0.5 * gate * (1.0 + tanh(inner))
    tl.store(out_ptr + row * SIZE + offs, cast(activated * up, dtype), mask=mask)


@op
def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute activation(gate) * up.

    Args:
        gate, up: (num_tokens, intermediate_size), fp16, bf16 or fp32, any stride on the first
            dimension, so that halves of a fused projection need no copy.
        activation: "silu", or "gelu_pytorch_tanh" (GELU approximated with tanh).

    Returns:
        A new contiguous tensor shaped like gate.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit, or the activation is unknown.
    """
    _TENSORS(gate, up)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected {' or '.join(ACTIVATIONS)}, got {activation!r}")
    num_tokens, size = gate.shape
    out = torch.empty(num_tokens, size, dtype=gate.dtype, device=gate.device)
    if num_tokens * size == 0:
        return out
    tile = activation_tile(size)
    launch(_gated_activation_kernel, (num_tokens * cdiv(size, tile.elements),),
        out, gate, up, gate.stride(0), up.stride(0),
        SIZE=size, TILE=tile.elements, ACTIVATION=activation,
        num_warps=tile.num_warps, **pdl_options(gate.device),
    )  # fmt: skip
    return out
