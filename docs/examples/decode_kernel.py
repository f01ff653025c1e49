"""Compare paged decode attention in Triton's interpreter with the PyTorch reference, on a CPU.

python docs/examples/decode_kernel.py
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from kernels import paged_decode_attention, reference


def main() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 64)  # two sequences, four query heads, two KV heads
    k_cache, v_cache = torch.randn(2, 8, 16, 2, 64)  # eight blocks of 16 tokens
    block_tables = torch.tensor([[3, 1, 6], [0, 5, 0]], dtype=torch.int32)
    context_lens = torch.tensor([40, 20], dtype=torch.int32)
    inputs = q, k_cache, v_cache, block_tables, context_lens
    error = paged_decode_attention(*inputs) - reference.paged_decode_attention(*inputs)
    print(f"largest difference: {error.abs().max():.1e}")


if __name__ == "__main__":
    main()
