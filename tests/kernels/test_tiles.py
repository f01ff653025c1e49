"""The tile table: properties that the kernels rely on, for every shape and GPU."""

from dataclasses import replace

import pytest
import torch

from kernels import tiles
from kernels.testing.cases import make_case
from kernels.tiles import Target, force_target, target_of

H200 = Target("cuda", 90, 132)
TARGETS = [
    H200,
    Target("cuda", 80, 108),
    Target("cuda", 86, 84),
    Target("cuda", 100, 148),
    Target("cuda", 120, 170),
    Target("interpreter", 0, 1),
]
SHARED_BYTES = {80: 164, 86: 100, 90: 228, 100: 228, 120: 100}


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.backend}-{t.arch}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim_padded", [16, 32, 64, 128, 256])
def test_decode_tile_is_one_that_the_kernel_can_run(head_dim_padded, dtype, target):
    for group_size in (1, 3, 8, 16, 17, 71, 128):
        tile = tiles.decode_tile(group_size, head_dim_padded, dtype, target)
        for size in (tile.tile_m, tile.tile_n):
            assert size >= 16
            assert size & (size - 1) == 0
        buffers = max(1, (tile.num_stages - 1) // 2)
        kv_bytes = buffers * 2 * tile.tile_n * head_dim_padded * dtype.itemsize
        if target.backend == "cuda" and dtype != torch.float32:
            limit = 1024 * SHARED_BYTES[target.arch]
            assert kv_bytes < limit / tiles.PROGRAMS_PER_MULTIPROCESSOR


@pytest.mark.parametrize(
    ("num_kv_heads", "num_splits", "max_tokens", "expected"),
    [
        pytest.param(8, None, 0, 1, id="empty table"),
        pytest.param(8, None, 1024, 1, id="sixteen tiles"),
        pytest.param(8, None, 1025, 2, id="a token more"),
        pytest.param(8, None, 10**6, 32, id="the maximum of 8 heads"),
        pytest.param(1, None, 10**6, 256, id="the maximum of one head"),
        pytest.param(128, None, 10**6, 16, id="the maximum of many heads"),
        pytest.param(8, 3, 65, 2, id="no more splits than tiles"),
        pytest.param(8, 3, 10**6, 3, id="splits as asked for"),
    ],
)
def test_chunks_of_a_sequence_in_tiles_of_64(num_kv_heads, num_splits, max_tokens, expected):
    chunks = tiles.chunking(num_kv_heads, num_splits)
    assert chunks.max_count(max_tokens, 64) == expected


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("group_size", [1, 4, 7, 8])
def test_a_turn_of_an_agent_fills_most_of_the_gpu_once(group_size, num_kv_heads):
    """A long sequence with any number of queries whose keys are divided."""
    heads = group_size * num_kv_heads, num_kv_heads
    for num_queries in range(1, tiles.few_queries(*heads) + 1):
        for target, programs in ((H200, 128), (Target("cuda", 80, 108), 104)):
            chunks = tiles.prefill_chunking(*heads, None, target)
            each = chunks.max_chunks // -(-num_queries // chunks.queries)
            launched = each * num_kv_heads * -(-num_queries * group_size // 128)
            assert each == 1 or launched <= programs
            assert target != H200 or group_size == 7 or launched > programs / 2
    assert tiles.few_queries(32, 8) == 256


@pytest.mark.parametrize(
    ("programs", "max_tokens", "expected"),
    [
        pytest.param(132, 4096, 1, id="one full wave"),
        pytest.param(1000, 32768, 1, id="many waves"),
        pytest.param(1, 0, 1, id="empty table"),
        pytest.param(8, 512, 4, id="short prefix"),
        pytest.param(8, 32768, 15, id="91 % full, where 33 splits fill all"),
        pytest.param(20, 32768, 6, id="91 % full too"),
    ],
)
def test_splits_of_a_prefix_on_an_h200(programs, max_tokens, expected):
    assert tiles.prefix_num_splits(programs, max_tokens, 64, H200) == expected


def test_forced_target_ends_with_its_block(device):
    own = target_of(torch.empty(0, device=device).device)
    with force_target(H200):
        assert target_of(device) == H200
    assert target_of(torch.empty(0, device=device).device) == own


def test_a_target_can_carry_tiles_in_place_of_the_tables():
    tile = tiles.AttentionTile(16, 16, num_warps=2, num_stages=1, precision="ieee")
    arguments = {"decode_tile": (4, 128), "prefill_tile": (128,), "split_prefill_tile": (128,)}

    def answers(target: Target) -> dict[str, tiles.AttentionTile]:
        return {
            name: getattr(tiles, name)(*shape, torch.bfloat16, target)
            for name, shape in arguments.items()
        }

    table = answers(H200)
    assert tile not in table.values()
    for name in ("decode_tile", "split_prefill_tile"):
        assert answers(replace(H200, tiles=((name, tile),))) == table | {name: tile}
    prefill = answers(replace(H200, tiles=(("prefill_tile", tile),)))
    assert prefill == table | {"prefill_tile": tile, "split_prefill_tile": tile}


def test_ops_run_with_the_tiles_of_a_forced_target(device):
    """Tiles of 16 and of 32 tokens round differently, so the result shows which one ran."""
    shape = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 32, "dtype": torch.float16}
    case = make_case("paged_decode_attention", **shape, context_lens=(290,), device=device)
    target = target_of(case.inputs["q"].device)
    table = tiles.decode_tile(2, 32, torch.float16, target)
    outputs = []
    for tile_n in (32, 16, 32):
        forced = (("decode_tile", replace(table, tile_n=tile_n)),)
        outputs.append(torch.empty_like(case.inputs["q"], dtype=torch.float32))
        case.inputs.update(num_splits=1, out=outputs[-1])
        with force_target(replace(target, tiles=forced)):
            assert all(result.passed for result in case.judge().values())
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_next_power_of_2():
    assert [tiles.next_power_of_2(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]
