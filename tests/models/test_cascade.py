"""Shared prefixes of decode batches: found in the block tables, read once, the same tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import LLM, SamplingParams, cascade
from models.cascade import cascade_pays, group_rows, prefix_groups, split_tables
from tests.models.tiny import tiny_config

SYSTEM = [(i * 37 + 11) % 97 for i in range(14)]
PROMPTS = [[*SYSTEM, 1, 2], [5, 6, 7], [*SYSTEM, *range(20, 29)], [*SYSTEM[:4], 9], [*SYSTEM, 3]]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=7),
    st.integers(1, 4),
    st.data(),
)
def test_groups_and_their_tables_hold_every_token_once(tables, block_size, data):
    context_lens = np.array(
        [(len(t) - 1) * block_size + data.draw(st.integers(1, block_size)) for t in tables]
    )
    found = prefix_groups([np.array(t) for t in tables], context_lens, block_size)
    for rows, num_blocks in found:
        assert len(rows) > 1
        assert num_blocks > 0
        heads = {tuple(tables[row][:num_blocks]) for row in rows}
        assert len(heads) == 1, "not a common prefix"
        shortest = int(context_lens[rows].min())
        assert num_blocks * block_size < shortest, "no token is left over"
        longer = {tuple(tables[row][: num_blocks + 1]) for row in rows}
        assert len(longer) > 1 or (num_blocks + 1) * block_size >= shortest, "not the longest"
    alike = [[row for row, t in enumerate(tables) if t[0] == first] for first in range(3)]
    shareable = [r for r in alike if len(r) > 1 and context_lens[r].min() > block_size]
    assert sorted(rows for rows, _ in found) == sorted(shareable)

    order, groups = group_rows(found, len(tables))
    assert sorted(order) == list(range(len(tables)))
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for place, row in enumerate(order):
        padded[place, : len(tables[row])] = tables[row]
    fields = split_tables(groups, padded, context_lens[order], block_size)
    assert {value.dtype for value in fields} == {np.dtype(np.int32)}
    offsets = fields.group_offsets
    assert offsets[0] == 0
    assert offsets[-1] == len(tables)
    for group, (start, end) in enumerate(itertools.pairwise(offsets)):
        prefix_len = fields.prefix_lens[group]
        prefix = fields.prefix_block_tables[group, : prefix_len // block_size].tolist()
        for place in range(start, end):
            suffix_len = int(fields.suffix_lens[place])
            assert prefix_len + suffix_len == context_lens[order[place]]
            suffix = fields.suffix_block_tables[place, : -(-suffix_len // block_size)]
            assert prefix + suffix.tolist() == tables[order[place]]


def test_when_it_pays():
    """The bytes that all but the first of a group spare, over all groups."""
    groups = [([0, 1, 2], 100), ([3, 5], 50)]
    at_least = cascade.CASCADE_BYTES // 250
    assert cascade_pays(groups, block_bytes=at_least + 1)
    assert not cascade_pays(groups, block_bytes=at_least - 1)
    assert not cascade_pays(groups, block_bytes=at_least + 1, replaces_graph=True)
    assert cascade_pays(groups, block_bytes=cascade.GRAPH_BYTES // 250 + 1, replaces_graph=True)
    assert not cascade_pays([], block_bytes=1 << 60)


@pytest.mark.parametrize(("budget", "window"), [(9, None), (64, None), (64, 11)])
def test_tokens_are_the_same(budget, window, monkeypatch):
    """For greedy requests, samples of one prompt and beams, with chunks of prompts or without."""
    greedy = SamplingParams(temperature=0, max_tokens=3)
    samples = SamplingParams(n=3, seed=3, max_tokens=3)
    params = [greedy, greedy, samples, SamplingParams(beam_width=2, max_tokens=3), greedy]
    config = tiny_config(initializer_range=0.3, windows=(window,) if window else ())

    def outputs(backend):
        sizes = {"block_size": 3, "num_blocks": 50, "max_num_batched_tokens": budget}
        llm = LLM(config, attention_backend=backend, **sizes)
        llm.generate(SYSTEM, greedy)
        return [[c.token_ids for c in output.outputs] for output in llm.generate(PROMPTS, params)]

    expected = outputs("torch")
    monkeypatch.setattr(cascade, "CASCADE_BYTES", 0)
    import kernels

    sizes, attend = [], kernels.shared_prefix_decode_attention

    def counted(query, k_cache, v_cache, tables, lens, offsets, *rest, **options):
        sizes.append(offsets.diff()[lens > 0].tolist())
        return attend(query, k_cache, v_cache, tables, lens, offsets, *rest, **options)

    monkeypatch.setattr(kernels, "shared_prefix_decode_attention", counted)
    assert outputs("triton") == expected
    if window:  # it would hide most of a prefix
        assert not sizes
    else:
        assert max(map(sum, sizes)) >= 5
