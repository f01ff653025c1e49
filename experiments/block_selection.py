"""Perplexity and attention mass of a real model that reads a share of its KV blocks per token.

SmolLM2-135M-Instruct computes windows of Python's documentation with an fp32 cache.  The prompt has
full attention.  The last tokens of a window are decoded: in every layer, each KV head reads
ceil(share x number of blocks) blocks, the last block among them.  Three rules choose the others:

    bounds  the largest bounds of the scores (``kernels.select_blocks``; Quest, Tang et al., 2024)
    recent  the first block and the latest blocks, as StreamingLLM (Xiao et al., 2024) keeps tokens
    oracle  the largest sums of attention weights over the KV head's query heads

The attention mass of a query is the part of its softmax weights, over all tokens, that is in the
chosen blocks.  The decoded tokens are computed together in plain PyTorch.  A test compares it with
``kernels.select_blocks`` and ``kernels.paged_decode_attention``.  Quest reads all blocks in the
first two layers; here all layers select."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments import style
from experiments.harness import Axis, Count, Experiment, Needs, Options, one_of
from experiments.load import engine_models

if TYPE_CHECKING:
    import torch

    from models import LLM

RULES = ("bounds", "recent", "oracle")
Share = Annotated[float, Needs("a number above 0, at most 1", lambda value: 0 < value <= 1)]


@dataclass(frozen=True, kw_only=True)
class BlockSelection(Options):
    """The grid: windows."""

    window: Axis[Count] = (2, 8, 14, 20, 26)
    """Windows of the text, by number from 1."""
    block_size: tuple[Count, ...] = (16, 32, 64, 128)
    share: tuple[Share, ...] = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
    """Shares of a sequence's blocks that each token reads."""
    model: Annotated[str, one_of(("tiny", engine_models.SMOLLM2))] = engine_models.SMOLLM2
    """The model ``tiny`` has random weights, and its tokens are bytes."""
    window_tokens: Count = 4096
    decoded_tokens: Count = 128
    """Number of tokens at the end of a window that are decoded."""
    threads: Count = 1

    @property
    def group(self) -> tuple[str, ...]:
        return (self.model,)


@dataclass
class Selecting:
    """Attention of a layer's new tokens, the last of one sequence, to the chosen blocks."""

    block_size: int
    share: float
    rule: str
    masses: list[torch.Tensor] = field(default_factory=list)
    """For each layer: mean attention mass of each query head, (num_q_heads,)."""

    def __call__(self, query, key, value, rotation, k_cache, v_cache, metadata, layer):
        from kernels import reference

        rotary = rotation.positions, rotation.cos, rotation.sin
        caches, slots = (k_cache, v_cache), metadata.slot_mapping
        reference.rope_store_kvcache(query, key, value, *caches, slots, *rotary)
        keys, values = (cache[0, : metadata.max_context_len] for cache in caches)
        out, mass = self.attention(query, keys, values, layer.scores["scale"])
        self.masses.append(mass.mean(dim=-1))
        return out

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output, shaped like q, and the mass of each query, (num_q_heads, queries).

        q: (num_queries, num_q_heads, head_dim), of the last positions.  k, v: (num_tokens,
        num_kv_heads, head_dim)."""
        import torch

        size, num_kv_heads, num_tokens = self.block_size, k.shape[1], len(k)
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -num_tokens % size)) for x in (k, v))
        queries = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        positions = torch.arange(num_tokens - len(q), num_tokens)[:, None]
        scores = (scale * queries) @ k.permute(1, 2, 0)[:, None]
        scores.masked_fill_(torch.arange(len(k)) > positions, -torch.inf)
        weights = scores.softmax(dim=-1)  # (num_kv_heads, group_size, num_queries, num_tokens)
        by_block = weights.unflatten(-1, (-1, size)).sum(dim=-1)
        columns, last = torch.arange(by_block.shape[-1]), positions // size
        if self.rule == "bounds":
            blocks = k.permute(1, 2, 0)[:, None].unflatten(-1, (-1, size))
            low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
            ranks = (queries.clamp(min=0) @ high + queries.clamp(max=0) @ low).amax(dim=1)
        elif self.rule == "oracle":
            ranks = by_block.sum(dim=1)
        else:
            ranks = columns.where(columns > 0, len(columns)).expand(num_kv_heads, len(q), -1)
        ranks = ranks.float().masked_fill(columns == last, torch.inf)
        ranks = ranks.masked_fill(columns > last, -torch.inf)
        places = ranks.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        budget = (self.share * (last + 1).double() - 1e-9).ceil()
        chosen = places < budget  # (num_kv_heads, num_queries, blocks)
        mass = (by_block * chosen[:, None]).sum(dim=-1)
        weights.mul_(chosen.repeat_interleave(size, dim=-1)[:, None])
        out = weights @ v.transpose(0, 1)[:, None] / mass[..., None]
        return out.permute(2, 0, 1, 3).flatten(1, 2), mass.flatten(0, 1)


def run_cell(cell: BlockSelection) -> list[dict[str, Any]]:
    import torch

    from models.attention import make_backend
    from models.runner import make_kv_cache

    if cell.decoded_tokens >= cell.window_tokens:
        raise ValueError(
            f"--decoded-tokens: expected fewer than --window-tokens={cell.window_tokens}, got "
            f"{cell.decoded_tokens}"
        )
    llm = engine_models.window_llm(cell.model, cell.window_tokens, cell.threads)
    text, start = engine_models.prose_tokens(llm), (cell.window - 1) * cell.window_tokens
    ids = torch.tensor(text[start : start + cell.window_tokens + 1])
    if len(ids) <= cell.window_tokens:
        raise ValueError(f"--window: the text ends before the end of window {cell.window}")
    cache = make_kv_cache(llm.model, 1, cell.window_tokens, torch.float32)
    first = cell.window_tokens - cell.decoded_tokens
    _compute(llm, ids[:first], 0, cache, make_backend("torch", llm.device))

    def decoded(size: int, share: float, rule: str) -> dict[str, Any]:
        selecting = Selecting(size, share, rule)
        hidden = _compute(llm, ids[first:-1], first, cache, selecting)
        nats = torch.nn.functional.cross_entropy(llm.model.logits(hidden), ids[first + 1 :])
        masses = torch.cat(selecting.masses)
        return {
            "nats_per_token": nats.item(),
            "mass": masses.mean().item(),
            "mass_p5": masses.quantile(0.05).item(),
            "mass_worst_head": masses.min().item(),
        }

    with torch.inference_mode():
        full = decoded(cell.block_size[0], 1.0, "bounds")
        about = cell.columns("model", "window", "window_tokens", "decoded_tokens")
        rows = [about | {"rule": "full", "share": 1.0} | full]
        for size, share, rule in product(cell.block_size, cell.share, RULES):
            if rule == "recent" and size > cell.block_size[0]:
                continue  # the block size matters little
            where = {"rule": rule, "block_size": size, "share": share}
            more = decoded(size, share, rule)
            more["nats_over_full"] = more["nats_per_token"] - full["nats_per_token"]
            rows.append(about | where | more)
    return rows


def _compute(
    llm: LLM, ids: torch.Tensor, first: int, cache: torch.Tensor, backend: Any
) -> torch.Tensor:
    """Compute tokens at positions ``first`` and later.  Returns their hidden states."""
    import torch

    from models.attention import AttentionMetadata
    from models.decoder import Attention

    for layer in llm.model.modules():
        if isinstance(layer, Attention):
            layer.backend = backend
    end = first + len(ids)
    positions, starts = torch.arange(first, end), torch.tensor([0, len(ids), end]).int()
    table, lens = starts[None, :1], starts[2:]
    batch = AttentionMetadata(positions, table, starts[:2], lens, len(ids), end)
    with torch.inference_mode():
        return llm.model(ids, positions, cache, batch)


def _summary(rows: style.DataFrame) -> style.DataFrame | None:
    """Means over windows, and the windows in which ratio and mass are least and largest."""
    selected = rows[rows["rule"] != "full"]
    return selected.groupby(["rule", "block_size", "share"], sort=False, as_index=False).agg(
        windows=("window", "nunique"),
        perplexity_ratio=("nats_over_full", lambda nats: np.exp(nats.mean())),
        perplexity_ratio_min=("nats_over_full", lambda nats: np.exp(nats.min())),
        perplexity_ratio_max=("nats_over_full", lambda nats: np.exp(nats.max())),
        mass=("mass", "mean"),
        mass_min=("mass", "min"),
        mass_max=("mass", "max"),
        mass_p5=("mass_p5", "mean"),
        mass_worst_head=("mass_worst_head", "min"),
    )


def _draw(rows: style.DataFrame) -> style.Figure | None:
    """A curve for each block size, and the other rules at the smallest block size."""
    summary = _summary(rows)
    if summary is None or summary.empty:
        return None
    figure, axes, _ = style.panel_grid(2, height=2.2, width=3.4)
    sizes = [int(size) for size in sorted(summary["block_size"].unique())]
    labels = {("bounds", size): f"blocks of {size}" for size in sizes}
    labels |= {(rule, sizes[0]): f"blocks of {sizes[0]}, {rule}" for rule in RULES[1:]}
    looks = style.lines_of(labels.values())
    panels = {"perplexity_ratio": "perplexity / with all blocks", "mass": "attention mass"}
    for axis, (column, ylabel) in zip(axes, panels.items(), strict=True):
        for number, ((rule, size), label) in enumerate(labels.items()):
            curve = summary[(summary["rule"] == rule) & (summary["block_size"] == size)]
            y, low, high = (curve[column + end] for end in ("", "_min", "_max"))
            x = curve["share"] * 1.03 ** (number - 2)  # bars at one share do not hide each other
            axis.errorbar(x, y, yerr=[y - low, high - y], elinewidth=0.7, **looks[label])
        style.log_x(axis, sorted(summary["share"].unique()), base=2)
        axis.set_ylabel(ylabel)
    return style.shared_legend(figure, columns=3, xlabel="share of the blocks that are read")


EXPERIMENT = Experiment(
    name="block_selection",
    figure="perplexity and attention mass of a real model that reads a share of its blocks",
    options=BlockSelection(),
    quick=BlockSelection(
        window=(1,), block_size=(16, 64), share=(1 / 8,), window_tokens=512, decoded_tokens=32
    ),
    run_cell=run_cell,
    plot=style.plotter({"block_selection": _draw}, {"summary": (_summary, "%.5g")}),
)
