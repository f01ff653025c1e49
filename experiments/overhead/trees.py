"""Radix trees: insert, match and evict of ours, beside SGLang's Python radix cache.

Prompts of 4,096 tokens, the first 1,024 shared by all, are inserted into an empty tree, looked up,
and evicted again, prompt by prompt and in turns.  An eviction frees the tokens of one prompt.
"""

from __future__ import annotations

import contextlib
import importlib.util
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

import cache
from cache.managers.radix_tree import RadixKey, RadixTree
from experiments import style
from experiments.harness import Absent, Axis, Count, Needs, Options, Unavailable, grid
from experiments.overhead import timing
from experiments.overhead.baselines import SGLangRadixCache

_SHARED_TOKENS = 1024
_PROMPT_TOKENS = 4096
_VOCABULARY = 150_000
_PROMPTS_A_TURN = 10
_PHASES = {
    "insert": "insert",
    "match": "match",
    "evict": "evict",
}
"""Phases of the rows, and their labels in the figure."""
_LOOKS = {"radix": style.bar(style.RED), "SGLang": style.bar(style.BLACK)}

# Whole pages, or the trees would share different parts of the prompts.
_PageSize = Needs(
    f"a divisor of {_SHARED_TOKENS}", lambda size: size >= 1 and _SHARED_TOKENS % size == 0
)


@dataclass(frozen=True, kw_only=True)
class Trees(Options):
    """The grid: page sizes; every implementation runs in each cell."""

    page_size: Axis[Annotated[int, _PageSize]] = (16, 1)
    """Tokens in a block of the radix trees."""
    tree_prompts: Count = 2_000
    """Prompts in each radix tree."""


@dataclass(frozen=True, kw_only=True)
class TreesCell(Trees):
    sglang: bool
    """Whether SGLang's tree takes part."""


def cells(options: Trees) -> Iterator[TreesCell | Absent]:
    sglang = importlib.util.find_spec("sglang") is not None
    if not sglang:
        yield Absent("SGLang is not installed")
    yield from grid(options, TreesCell, sglang=sglang)


class _Ours:
    """The tree of the manager ``radix``."""

    name = "radix"
    version = ""

    def __init__(self, page_size: int, capacity: int) -> None:
        self._page_size = page_size
        self.tree = RadixTree(page_size, cache.make_policy("lru"), capacity)

    def make(self, number: int, token_ids: list[int]):
        """A sequence and its blocks."""
        blocks = len(token_ids) // self._page_size
        first = number * blocks
        return cache.Sequence(number, token_ids), array("i", range(first, first + blocks))

    def insert(self, prompt) -> None:
        seq, blocks = prompt
        node, _ = self.tree.insert(RadixKey(seq, self._page_size), blocks)
        self.tree.unlock(node)

    def match(self, prompt) -> int:
        """Number of cached tokens.  Counts as a use of them, as in SGLang."""
        seq, blocks = prompt
        match = self.tree.match_prefix(RadixKey(seq, self._page_size), len(blocks))
        self.tree.unlock(self.tree.lock(match))
        return len(match.blocks) * self._page_size

    def evict(self, num_tokens: int) -> None:
        self.tree.evict(-(-num_tokens // self._page_size))

    @property
    def num_tokens(self) -> int:
        """Tokens in the tree."""
        return self.tree.num_evictable * self._page_size


def run_cell(cell: TreesCell) -> list[dict[str, Any]]:
    generator = np.random.default_rng(cell.seed)
    shared = generator.integers(_VOCABULARY, size=_SHARED_TOKENS).tolist()
    num_prompts = cell.tree_prompts
    trees = [_Ours(cell.page_size, num_prompts * _PROMPT_TOKENS // cell.page_size)]
    if cell.sglang:
        with contextlib.suppress(Unavailable):
            trees.append(SGLangRadixCache(cell.page_size))
    prompts: list[list[Any]] = [[] for _ in trees]
    for number in range(num_prompts):
        rest = generator.integers(_VOCABULARY, size=_PROMPT_TOKENS - _SHARED_TOKENS).tolist()
        rest[0] = number  # no two share more by chance
        for tree, made in zip(trees, prompts, strict=True):
            made.append(tree.make(number, shared + rest))

    with timing.without_collection():
        spans = _measure(trees, prompts)
    return [
        {
            "page_size": cell.page_size,
            "implementation": tree.name,
            "version": tree.version,
            "phase": phase,
            "requests": num_prompts,
            **timing.columns("prompt", seconds),
        }
        for tree, of_tree in zip(trees, spans, strict=True)
        for phase, seconds in of_tree.items()
    ]


def _measure(trees: list[Any], prompts: list[list[Any]]) -> list[dict[str, list[float]]]:
    """Seconds per prompt of each phase, for each tree."""
    spans = [defaultdict(list) for _ in trees]
    turns = list(zip(trees, prompts, spans, strict=True))
    num_prompts = len(prompts[0])
    new_tokens = _PROMPT_TOKENS - _SHARED_TOKENS
    all_tokens = _SHARED_TOKENS + num_prompts * new_tokens

    def each_prompt(phase: str) -> None:
        for start in range(0, num_prompts, _PROMPTS_A_TURN):
            for tree, made, span in turns:
                call = tree.insert if phase == "insert" else tree.match
                for prompt in made[start : start + _PROMPTS_A_TURN]:
                    span[phase].append(timing.seconds_of(call, prompt))
            turns.reverse()

    each_prompt("insert")
    for tree, made, _ in turns:
        found = tree.match(made[-1])
        if (tree.num_tokens, found) != (all_tokens, _PROMPT_TOKENS):
            raise RuntimeError(f"{tree.name}: {tree.num_tokens} tokens, {found} of a prompt found")
    each_prompt("match")
    for _ in range(0, all_tokens, new_tokens):
        for tree, _, span in turns:
            tokens = min(new_tokens, tree.num_tokens)
            span["evict"].append(timing.seconds_of(tree.evict, tokens))
    for tree, *_ in turns:
        if tree.num_tokens:
            raise RuntimeError(f"{tree.name}: {tree.num_tokens} tokens are left")
    return spans


def table(rows: style.DataFrame) -> style.DataFrame:
    """Median microseconds per prompt by page size and phase, a column per implementation."""
    medians = rows.pivot(index=["page_size", "phase"], columns="implementation", values="us")
    medians = medians.reindex(_PHASES, level="phase").add_suffix("_us_per_prompt").reset_index()
    return medians.astype({"page_size": int})


def draw(rows: style.DataFrame) -> style.Figure:
    """Bars of each phase on a logarithmic scale, a panel per page size."""
    by_page = list(rows.groupby("page_size"))[::-1]
    figure, panels, _ = style.panel_grid(
        len(by_page), height=2.0, width=3.3, columns=2, sharey=True
    )
    for axis, (page_size, of_page) in zip(panels, by_page, strict=True):
        medians = of_page.pivot(index="phase", columns="implementation", values="us")
        medians = medians.reindex([phase for phase in _PHASES if phase in medians.index])
        style.bars(axis, medians, _LOOKS)
        axis.set(yscale="log", ylim=(1, None))
        for bars in axis.containers:
            axis.bar_label(bars, fmt=lambda us: f"{us:.{1 if us < 10 else 0}f}", fontsize=5.5)
        axis.set_xticks(range(len(medians)), map(_PHASES.get, medians.index), fontsize=6)
        axis.set(title=f"pages of {page_size:g} token{'s' if page_size > 1 else ''}")
    style.plain_log_ticks(panels[0].yaxis)
    panels[0].set_ylabel("µs per prompt of 4,096 tokens")
    return style.shared_legend(figure)
