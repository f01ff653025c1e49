"""How blocks are described as runs: every element of every layout, and as few runs as possible."""

import pytest
import torch

from kernels.block_layout import block_runs
from kernels.testing.inputs import LAYOUTS, make_cache


def offsets_of(cache):
    """Offset of each element of a block, in the order in which `element_offsets` counts them."""
    runs = block_runs(cache)
    (outer, inner), index = runs.strides[0], torch.arange(runs.num_elements)
    run, within = index // runs.run, index % runs.run
    return run // runs.inner_runs * outer + run % runs.inner_runs * inner + within


def cache_of(*shape):
    return torch.empty(shape, device="meta")


STRIDED = {
    "dense": (cache_of(4, 7, 3, 16), 7 * 3 * 16),
    "HND": (cache_of(4, 3, 7, 16).transpose(1, 2), 7 * 3 * 16),
    "one-head": (cache_of(4, 7, 1, 16), 7 * 16),
    "one-slot": (cache_of(4, 1, 3, 16), 3 * 16),
    "half-the-heads": (cache_of(4, 7, 6, 16)[:, :, :3], 3 * 16),
    "every-other-head": (cache_of(4, 7, 6, 16)[:, :, ::2], 16),
    "every-other-slot": (cache_of(4, 14, 3, 16)[:, ::2], 3 * 16),
    "half-the-dims": (cache_of(4, 7, 3, 32)[..., :16], 16),
    "half-the-dims-HND": (cache_of(4, 3, 7, 32).transpose(1, 2)[..., :16], 16),
}


@pytest.mark.parametrize(("cache", "run"), STRIDED.values(), ids=STRIDED)
def test_every_element_once_in_runs_of_full_length(cache, run):
    assert block_runs(cache).run == run
    dims = [torch.arange(n) * s for n, s in zip(cache.shape[1:], cache.stride()[1:], strict=True)]
    want = (dims[0][:, None, None] + dims[1][:, None] + dims[2]).flatten()
    assert torch.equal(offsets_of(cache).sort().values, want.sort().values)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if "unaligned" not in x])
def test_whole_blocks_are_one_run_in_every_layout(layout):
    k_cache, v_cache = make_cache(3, 5, 2, 16, dtype=torch.float16, device="meta", layout=layout)
    assert block_runs(k_cache).run == block_runs(v_cache).run == 5 * 2 * 16


def test_caches_of_different_layouts_share_only_rows():
    runs = block_runs(cache_of(4, 3, 7, 16).transpose(1, 2), cache_of(9, 7, 3, 16))
    assert runs.run == 16
    assert runs.strides == ((7 * 16, 16), (16, 3 * 16))
    assert runs.inner_runs == 7
