"""Token positions to cache slots, on the device.

Position p of sequence s lies in slot block_tables[s, p // block_size] * block_size + p %
block_size.
"""

import torch
import triton
import triton.language as tl

from kernels.checks import INT32, INTEGERS, Arg, TensorSpec, check_integer, check_values
from kernels.launch import launch, op
from kernels.tiles import INDEX_TILE, cdiv

_TENSORS = TensorSpec(
    Arg("positions", "num_tokens", INTEGERS),
    Arg("block_tables", "num_seqs max_blocks", INT32),
    Arg("seq_ids", "num_tokens", INTEGERS),
)


@triton.jit(do_not_specialize=["num_tokens", "max_blocks", "stride_table", "block_size"])
def _slot_mapping_kernel(
    slots_ptr, positions_ptr, block_tables_ptr, seq_ids_ptr,
    num_tokens, max_blocks, stride_table, block_size, TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    token_mask = tokens < num_tokens
    positions = tl.load(positions_ptr + tokens, mask=token_mask, other=-1)
    columns = positions // block_size
    mapped = (positions >= 0) & (columns < max_blocks)
    seqs = tl.load(seq_ids_ptr + tokens, mask=mapped, other=0).to(tl.int64)
    block_ids = tl.load(block_tables_ptr + seqs * stride_table + columns, mask=mapped, other=-1).to(
        tl.int64
    )
    slots = block_ids * block_size + positions % block_size
    tl.store(slots_ptr + tokens, tl.where(block_ids >= 0, slots, -1), mask=token_mask)


@op
def slot_mapping_from_positions(
    positions: torch.Tensor, block_tables: torch.Tensor, seq_ids: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Compute the cache slots of tokens from their positions and sequences.

    The op runs on the block tables' device. So a model runner needs no slot mapping from the host,
    and a captured CUDA graph can advance its own positions.

    Args:
        positions: (num_tokens,) int32 or int64, the token's position in its sequence. Negative
            positions are padding.
        block_tables: (num_seqs, max_blocks) int32, any stride between rows.
        seq_ids: (num_tokens,) int32 or int64, the token's row in block_tables. Not read if the
            position is negative.
        block_size: token slots per block.

    Returns:
        (num_tokens,) int64: block_id * block_size + offset, or -1 for a negative position, a
        position past the table or a negative table entry. store_kvcache skips -1.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit. For tensors in host memory also:
            a position is past the table, or a seq_id is not a row of it.
    """
    num_tokens = _TENSORS(positions, block_tables, seq_ids).num_tokens
    block_size = check_integer("block_size", block_size, 1)
    slots = torch.empty(num_tokens, dtype=torch.int64, device=positions.device)
    if num_tokens == 0:
        return slots
    if positions.is_cpu:
        num_seqs, max_blocks = block_tables.shape
        what = f"positions ({max_blocks} columns of block_size {block_size})"
        check_values("positions", positions, high=max_blocks * block_size - 1, what=what)
        rows = "rows of block_tables"
        check_values("seq_ids", seq_ids, 0, num_seqs - 1, rows, where=positions >= 0)
    launch(_slot_mapping_kernel, (cdiv(num_tokens, INDEX_TILE.elements),),
        slots, positions, block_tables, seq_ids,
        num_tokens, block_tables.shape[1], block_tables.stride(0), block_size,
        TILE_TOKENS=INDEX_TILE.elements, num_warps=INDEX_TILE.num_warps,
    )  # fmt: skip
    return slots
