"""Decode attention for sequences that share prefixes: each prefix is read once for its whole group.

Plain decode reads a shared system prompt once per sequence. Here attention is split by keys
(Hydragen, Juravsky et al., 2024; FlashInfer's cascade). First a group's queries attend to the
group's prefix; the rows of a tile are queries x heads. Then each sequence attends to its own suffix
(paged_decode_attention.py). Both parts write split states, and a last kernel merges them.

The prefix part has group members x heads as rows, like prefill, so the prefill kernel computes it
(paged_prefill_attention.py). The work per byte grows with the group. Programs of one split are
launched next to each other, so the tiles of a large group find the keys and values in L2. A tile's
group is looked up on the device, so the launch depends only on the batch and the number of groups.
Tiles and splits start at fixed positions. So the result is batch-invariant at given split counts.
"""

from dataclasses import replace

import torch

from kernels import checks
from kernels.checks import INT32, Arg, attention_spec
from kernels.fp8_cache import Scale
from kernels.launch import op
from kernels.paged_decode_attention import decode_chunking, launch_decode
from kernels.paged_prefill_attention import count_tiles, launch_prefill
from kernels.score_options import ScoreOptions
from kernels.split_states import SplitStates, results_of
from kernels.tiles import padded_dim, prefix_num_splits, split_prefill_tile, target_of

_TENSORS = attention_spec(
    "batch",
    Arg("prefix_lens", "num_groups", INT32),
    Arg("group_offsets", "num_groups+1", INT32),
    Arg("prefix_block_tables", "num_groups max_prefix_blocks", INT32),
    Arg("suffix_block_tables", "batch max_blocks", INT32),
    Arg("suffix_lens", "batch", INT32),
)


def _check_prefixes(
    prefix_block_tables: torch.Tensor, prefix_lens: torch.Tensor, group_offsets: torch.Tensor,
    suffix_lens: torch.Tensor, k_cache: torch.Tensor, window_size: int | None,
) -> None:  # fmt: skip
    """Check group offsets, and the tables of all prefixes that are read (CPU tensors only)."""
    offsets = group_offsets.tolist()
    batch = suffix_lens.shape[0]
    if offsets[0] != 0 or offsets[-1] != batch or offsets != sorted(offsets):
        raise ValueError(
            f"group_offsets: expected values that ascend from 0 to batch={batch}, got {offsets}"
        )
    group_sizes = group_offsets.diff()
    used = group_sizes > 0
    windows = None
    if window_size is not None:  # the part of a prefix that the shortest suffix leaves in view
        members = suffix_lens.split(group_sizes.tolist())
        windows = torch.tensor([window_size - int(min(lens, default=0)) for lens in members])
        used &= windows > 0
    checks.check_block_tables(
        prefix_block_tables,
        prefix_lens.where(used, 0),
        k_cache,
        window_size=windows,
        names=("prefix_block_tables", "prefix_lens"),
    )


@op
def shared_prefix_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    prefix_block_tables: torch.Tensor, prefix_lens: torch.Tensor, group_offsets: torch.Tensor,
    suffix_block_tables: torch.Tensor, suffix_lens: torch.Tensor,
    *,
    scale: float | None = None, window_size: int | None = None, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    k_scale: Scale = None, v_scale: Scale = None,
    num_prefix_splits: int | None = None, num_splits: int | None = None,
    out: torch.Tensor | None = None, return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one query token per sequence, in groups of sequences that share a prefix.

    Up to rounding, the result equals paged_decode_attention over the group's prefix followed by the
    sequence's suffix. But a prefix is read only once per group.

    Args:
        q: (batch, num_q_heads, head_dim), fp16, bf16 or fp32; head_dim 16 to 256. The
            sequences of a group are adjacent.
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim) in q's dtype or fp8 e4m3,
            any strides but a contiguous last dimension. num_q_heads is a multiple of num_kv_heads.
        prefix_block_tables: (num_groups, max_prefix_blocks) int32, blocks of each group's prefix.
        prefix_lens: (num_groups,) int32, tokens per prefix, not necessarily whole blocks. Sequences
            that share no prefix form a group with length 0, together or separately.
        group_offsets: (num_groups + 1,) int32, the first sequence of each group, from 0 to batch.
            The prefix of an empty group (padding of a captured graph) is not read.
        suffix_block_tables: (batch, max_blocks) int32, blocks of each sequence's own tokens. These
            start at slot 0 of a new block.
        suffix_lens: (batch,) int32, number of own tokens per sequence, including the current token.
        scale, window_size, softcap, alibi_slopes, sinks, k_scale, v_scale: see
            `paged_decode_attention`. A window spans suffix and prefix.
        num_prefix_splits: number of programs that share a prefix. For a given number, a sequence's
            result is bitwise the same whatever else is in the batch. None chooses from shapes and
            the GPU.
        num_splits: maximum number of chunks of a suffix, see `paged_decode_attention`.
        out: (batch, num_q_heads, head_dim) to write to, in q's dtype or fp32; allocated if None.
        return_lse: also return the LSE.

    Returns:
        The output. With return_lse also the LSE: (batch, num_q_heads) fp32, natural log, with the
        sink. A sequence without prefix and suffix gets output 0 and LSE -inf; with sinks, LSE =
        sink. Table entries past a length, or before the windows of all sequences that share them,
        are never read.

    Mutates only out. Launches three kernels. Grids depend on shapes and the GPU alone, and the host
    does not synchronise. So a CUDA graph can capture the call and replay it with other groups,
    lengths and tables.

    Raises:
        ValueError: a shape, dtype, device, stride or option does not fit. For tensors in host
            memory also: group offsets do not ascend from 0 to batch, a table is too narrow for its
            length, or a block id is invalid.
    """
    sizes = _TENSORS(
        k_cache, v_cache, k_scale, v_scale, q, out,
        prefix_lens, group_offsets, prefix_block_tables, suffix_block_tables, suffix_lens,
        alibi_slopes, sinks,
    )  # fmt: skip
    batch, num_q_heads, num_kv_heads = sizes.batch, sizes.num_q_heads, sizes.num_kv_heads
    options = ScoreOptions.checked(
        k_cache, scale, window_size, softcap, alibi_slopes, sinks, k_scale, v_scale
    )
    num_splits = checks.check_num_splits("num_splits", num_splits)
    num_prefix_splits = checks.check_num_splits("num_prefix_splits", num_prefix_splits)
    names = ("suffix_block_tables", "suffix_lens")
    checks.check_block_tables(
        suffix_block_tables, suffix_lens, k_cache, window_size=options.window_size, names=names
    )
    if q.is_cpu:
        prefixes = (prefix_block_tables, prefix_lens, group_offsets)
        _check_prefixes(*prefixes, suffix_lens, k_cache, options.window_size)
    out, lse = results_of(q, out, return_lse)
    if batch == 0:
        return out if lse is None else (out, lse)

    if num_prefix_splits is None:
        target = target_of(q.device)
        tile = split_prefill_tile(padded_dim(sizes.head_dim), q.dtype, target, k_cache.itemsize)
        group_size = num_q_heads // num_kv_heads
        num_tiles, _ = count_tiles(batch, sizes.num_groups, batch, group_size, tile.tile_m)
        max_tokens = sizes.max_prefix_blocks * sizes.block_size
        num_prefix_splits = prefix_num_splits(
            num_tiles * num_kv_heads, max_tokens, tile.tile_n, target
        )
    plan = decode_chunking(q, k_cache, suffix_block_tables, options.window_size, num_splits)
    states = SplitStates.empty(q, num_prefix_splits + plan[-1])
    attended = (q, k_cache, v_cache)
    launch_prefill(
        states.acc, states.sums, *attended, prefix_block_tables, group_offsets, prefix_lens,
        replace(options, sinks=None, ahead=None),
        max_seqlen_q=batch, num_splits=num_prefix_splits, suffix_lens=suffix_lens,
    )  # fmt: skip
    launch_decode(
        out, lse, *attended, suffix_block_tables, suffix_lens, options,
        plan=plan, states=states, first_state=num_prefix_splits,
    )  # fmt: skip
    return out if lse is None else (out, lse)
