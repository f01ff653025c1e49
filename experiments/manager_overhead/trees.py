"""What a radix tree costs: the part of ``manager_overhead`` that is about trees alone.

Prompts of 4,096 tokens, the first 1,024 of which all share, are inserted into an empty tree, looked
up, and evicted again.  Two ways to evict: as an engine does, the tokens of one prompt a call, while
there are any; and everything in one call.  SGLang's Python radix cache runs beside ours where it is
installed, prompt by prompt in turns.
"""

from __future__ import annotations

import contextlib
import gc
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import cache
from cache.managers.radix_tree import RadixKey, RadixTree
from experiments import quantiles, style
from experiments.harness import Axis, Options, Unavailable
from experiments.manager_overhead.baselines import SGLangRadixCache

SHARED_TOKENS = 1024
"""Whole pages, or the trees would share different parts of the prompts."""
_PROMPT_TOKENS = 4096
_VOCABULARY = 150_000
_PROMPTS_A_TURN = 10
_EVICTIONS_OF_ALL = 5

OPERATIONS = {
    "tree_insert": "insert",
    "tree_match": "match",
    "tree_evict": "evict, a prompt a call",
    "tree_evict_all": "evict, all in one call",
}
"""Phases of the rows, and what the figure calls them."""

_LOOKS = {
    "radix_us_per_prompt": style.bar(style.RED) | {"label": "radix"},
    "SGLang_us_per_prompt": style.bar(style.BLACK) | {"label": "SGLang"},
}
QUANTILES = {"": 0.5, "_p10": 0.1, "_p90": 0.9}


@dataclass(frozen=True, kw_only=True)
class Trees(Options):
    page_size: Axis[int]
    prompts: int


class _Ours:
    """The tree of manager ``radix``."""

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
        """Cached tokens.  Counts as a use of them, as in SGLang."""
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


def run_cell(cell: Trees) -> list[dict[str, Any]]:
    generator = np.random.default_rng(cell.seed)
    shared = generator.integers(_VOCABULARY, size=SHARED_TOKENS).tolist()
    trees = [_Ours(cell.page_size, cell.prompts * _PROMPT_TOKENS // cell.page_size)]
    with contextlib.suppress(Unavailable):
        trees.append(SGLangRadixCache(cell.page_size))
    prompts: list[list[Any]] = [[] for _ in trees]
    for number in range(cell.prompts):
        rest = generator.integers(_VOCABULARY, size=_PROMPT_TOKENS - SHARED_TOKENS).tolist()
        rest[0] = number  # no two share more by chance
        for tree, made in zip(trees, prompts, strict=True):
            made.append(tree.make(number, shared + rest))

    with without_collection():
        spans = _measure(trees, prompts)
    return [
        {
            "page_size": cell.page_size,
            "implementation": tree.name,
            "version": tree.version,
            "phase": phase,
            "requests": cell.prompts,
            **quantiles.columns("us_per_prompt", [1e6 * s for s in seconds], QUANTILES),
        }
        for tree, of_tree in zip(trees, spans, strict=True)
        for phase, seconds in of_tree.items()
    ]


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python's garbage collector out: its pauses would fall on whoever happens to run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _measure(trees: list[Any], prompts: list[list[Any]]) -> list[dict[str, list[float]]]:
    """Per tree, for each phase the seconds that every prompt takes."""
    spans = [defaultdict(list) for _ in trees]
    turns = list(zip(trees, prompts, spans, strict=True))
    num_prompts = len(prompts[0])
    new_tokens = _PROMPT_TOKENS - SHARED_TOKENS
    all_tokens = SHARED_TOKENS + num_prompts * new_tokens

    def each_prompt(phase: str) -> None:
        for start in range(0, num_prompts, _PROMPTS_A_TURN):
            for tree, made, span in turns:
                call = tree.insert if phase == "tree_insert" else tree.match
                for prompt in made[start : start + _PROMPTS_A_TURN]:
                    span[phase].append(_seconds(call, prompt))
            turns.reverse()

    each_prompt("tree_insert")
    for tree, made, _ in turns:
        found = tree.match(made[-1])
        if (tree.num_tokens, found) != (all_tokens, _PROMPT_TOKENS):
            raise RuntimeError(f"{tree.name}: {tree.num_tokens} tokens, {found} of a prompt found")
    each_prompt("tree_match")
    for _ in range(0, all_tokens, new_tokens):
        for tree, _, span in turns:
            tokens = min(new_tokens, tree.num_tokens)
            span["tree_evict"].append(_seconds(tree.evict, tokens))
    for _ in range(_EVICTIONS_OF_ALL):
        for tree, made, span in turns:
            for prompt in made:
                tree.insert(prompt)
            span["tree_evict_all"].append(_seconds(tree.evict, all_tokens) / num_prompts)
    for tree, *_ in turns:
        if tree.num_tokens:
            raise RuntimeError(f"{tree.name}: {tree.num_tokens} tokens are left")
    return spans


def _seconds(call, argument) -> float:
    begin = time.perf_counter()
    call(argument)
    return time.perf_counter() - begin


def table(rows: style.DataFrame) -> style.DataFrame | None:
    """Medians by page size and operation, a column per implementation; None without rows."""
    rows = rows[rows["phase"].isin(OPERATIONS)]
    if rows.empty:
        return None
    order = list(OPERATIONS.values())
    medians = rows.assign(operation=rows["phase"].map(OPERATIONS)).pivot(
        index=["page_size", "operation"], columns="implementation", values="us_per_prompt"
    )
    medians = medians.add_suffix("_us_per_prompt").reset_index().astype({"page_size": int})
    return medians.sort_values("operation", key=lambda names: names.map(order.index), kind="stable")


def draw(rows: style.DataFrame) -> style.Figure | None:
    """Bars of each operation, a panel for every page size, on a logarithmic scale."""
    medians = table(rows)
    if medians is None:
        return None
    page_sizes = sorted(medians["page_size"].unique(), reverse=True)
    figure, panels, _ = style.panel_grid(
        len(page_sizes), height=2.0, width=3.3, columns=2, sharey=True
    )
    for axis, page_size in zip(panels, page_sizes, strict=True):
        of_page = medians[medians["page_size"] == page_size].set_index("operation")
        style.bars(axis, of_page, _LOOKS)
        axis.set(yscale="log", ylim=(1, None))
        for bars in axis.containers:
            axis.bar_label(bars, fmt=lambda us: f"{us:.{1 if us < 10 else 0}f}", fontsize=5.5)
        names = [name.replace(", ", ",\n") for name in of_page.index]
        axis.set_xticks(range(len(names)), names, fontsize=6)
        axis.set(title=f"pages of {page_size:g} token{'s' if page_size > 1 else ''}")
    style.plain_log_ticks(panels[0].yaxis)
    panels[0].set_ylabel("µs per prompt of 4,096 tokens")
    return style.shared_legend(figure)
