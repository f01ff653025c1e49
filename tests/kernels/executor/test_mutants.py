"""Mutation tests: each mutant breaks one line of a kernel's PTX, and the executor should catch it.

A mutant is caught if execution raises Fault, or if any bit of the result differs. The uncaught
mutants that were inspected are harmless. They break one of these:

- a copy mask of a prefetched tile that is not used
- a row mask, where the store masks the rows again
- a comparison whose operands are never equal
- a barrier, where another barrier follows before the warps share data
- a fence, where another fence precedes or follows without a store in between
- a wait for stores to tensor memory that the next wait covers too

Needs `--executor`. `-s` prints a table of the mutants and their outcomes.
"""

from __future__ import annotations

import re
from collections import Counter

import torch

from kernels import (
    merge_attention_states,
    paged_decode_attention,
    paged_prefill_attention,
    store_kvcache,
)
from kernels.executor import Fault, execute_ptx
from kernels.testing.inputs import random_paged_batch

SHAPE = {"num_kv_heads": 1, "head_dim": 64, "block_size": 16, "device": "cpu"}


# name: (pattern of a line, replacement, smallest fraction of mutants that must be caught over all
# kernels). Only the first pattern that matches a line is applied. "copy mask dropped" has no bound:
# it prefetches a tile that is not used, a fault only past the block table.
MUTATIONS = {
    "barrier removed": (r"^\s*bar\.sync\s+0;$", "", 0.5),
    "copy wait weakened": (
        r"(\bcp\.async\.wait_group\s+)(\d+);",
        lambda matched: f"{matched[1]}{int(matched[2]) + 1};",
        0.6,
    ),
    "copy mask dropped": (r"(\bcp\.async\.c[ag]\.\S+ \[.*?\], \[.*?\], \w+), %r\d+;", r"\1;", 0),
    "load mask dropped": (r"@!?%p\d+ (ld\.global)", r"\1", 0.6),
    "store mask dropped": (r"@!?%p\d+ (st\.global)", r"\1", 0.8),
    "mask off by one": (r"\bsetp\.lt\.s(32|64)\b", r"setp.le.s\1", 0.15),
    "shared offset": (
        r"(\b(?:st\.shared|ldmatrix)\S* .*?\[ ?%r\d+) ?(?:\+ ?0 ?)?\]",
        r"\1+64]",
        0.7,
    ),
    "proxy fence removed": (r"^\s*fence\.proxy\.async\S*;$", "", 0.4),
    "wgmma fence removed": (r"^\s*wgmma\.fence\S*;$", "", 0.6),
    "wgmma wait removed": (r"^\s*wgmma\.wait_group\S*\s+0;$", "", 1.0),
    "mbarrier wait removed": (r"^(\s*)@!complete bra\.uni waitLoop;$", "", 1.0),
    "commit removed": (r"^\s*@%p\d+ tcgen05\.commit\S* .*;$", "", 1.0),
    "tensor wait removed": (r"^\s*tcgen05\.wait::(ld|st)\S*;$", "", 0.6),
}
MAX_PER_MUTATION = 6


def _store():
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 5, 1, 64, generator=generator).half()
    caches = torch.zeros(2, 2, 16, 1, 64, dtype=torch.float16)
    store_kvcache(key, value, *caches, torch.tensor([3, -1, 31, 0, 7]))
    return caches


def _hostile_batch(context_lens: list[int], **shape):
    """A batch that reveals missing masks. Block 0, which masked lanes address, is NaN. The block
    table ends with the longest sequence."""
    batch = random_paged_batch(context_lens, num_q_heads=4, dtype=torch.float16, **SHAPE, **shape)
    caches = [
        torch.cat([torch.full_like(cache[:1], torch.nan), cache])
        for cache in (batch.k_cache, batch.v_cache)
    ]
    width = -(-max(context_lens) // SHAPE["block_size"])
    tables = batch.block_tables[:, :width].clamp(max=2**31 - 2) + 1
    return (batch.q, *caches, tables), batch


def _decode():
    arguments, batch = _hostile_batch([37, 530])  # several full tiles and a partial one
    return paged_decode_attention(*arguments, batch.context_lens, num_splits=1)


def _prefill():
    arguments, batch = _hostile_batch([70, 280], query_lens=[3, 40])
    lengths = batch.cu_seqlens_q, batch.context_lens
    return paged_prefill_attention(*arguments, *lengths, max_seqlen_q=40, num_splits=1)


def _merge():
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(2, 3, 5, 64, generator=generator).half()
    return merge_attention_states(outs[0], torch.zeros(3, 5), outs[1], torch.ones(3, 5))[0]


KERNELS = {"store": _store, "decode": _decode, "prefill": _prefill, "merge": _merge}


def mutants_of(ptx: str) -> list[tuple[str, str]]:
    """(mutation, PTX) pairs: at most MAX_PER_MUTATION of each, spread over the kernel."""
    lines, found = ptx.split("\n"), {name: [] for name in MUTATIONS}
    for number, line in enumerate(lines):
        for name, (pattern, replacement, _) in MUTATIONS.items():
            broken, count = re.subn(pattern, replacement, line)
            if count:
                found[name].append("\n".join([*lines[:number], broken, *lines[number + 1 :]]))
                break
    chosen = []
    for name, texts in found.items():
        step = max(1, len(texts) // MAX_PER_MUTATION)
        chosen += [(name, text) for text in texts[::step][:MAX_PER_MUTATION]]
    return chosen


def outcome(run, architecture: str, text: str, expected: torch.Tensor) -> str:
    """Outcome of a mutant: "fault", "result" (it differs) or "unnoticed"."""
    try:
        with execute_ptx(architecture, edit=lambda _name, _ptx: text):
            result = run()
    except Fault:
        return "fault"
    same = torch.equal(result.view(torch.int16), expected.view(torch.int16))
    return "unnoticed" if same else "result"


def test_mutants_are_caught(request):
    architecture = request.config.getoption("--executor").removeprefix("ptx-")
    table: dict[tuple[str, str], Counter] = {}
    for kernel, run in KERNELS.items():
        seen = {}
        with execute_ptx(
            architecture, edit=lambda name, ptx, seen=seen: seen.setdefault(name, ptx)
        ):
            expected = run()
        (ptx,) = seen.values()
        for mutation, text in mutants_of(ptx):
            row = table.setdefault((kernel, mutation), Counter())
            row[outcome(run, architecture, text, expected)] += 1

    print(f"\n{architecture}: mutants, faults, wrong results, unnoticed")
    for (kernel, mutation), row in table.items():
        counts = [row.total(), row["fault"], row["result"], row["unnoticed"]]
        print(f"{kernel:10}{mutation:22}", *(f"{count:4}" for count in counts))
    assert sum(row.total() for row in table.values()) >= 50
    for mutation, (_, _, least) in MUTATIONS.items():
        rows = sum((row for (_, name), row in table.items() if name == mutation), Counter())
        if rows:
            assert rows["fault"] + rows["result"] >= least * rows.total(), (mutation, rows)
