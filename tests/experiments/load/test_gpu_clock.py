"""The clock from measured operator times: its parts by hand, and what it refuses."""

import contextlib
import functools
import itertools

import pandas as pd
import pytest

from cache import make_manager
from cache.serving import open_loop
from cache.serving.scheduler import Step
from experiments import gpu_times
from experiments.load.gpu_clock import GpuClock

MODELS, CARDS = (list(gpu_times.rows(name).itertuples()) for name in ("models", "cards"))
SMALL = {"max_num_seqs": 64, "max_num_batched_tokens": 256}


@functools.cache
def clock(model="llama-3.1-8b", gpu="H100-SXM", tensor_parallel=1, **options) -> GpuClock:
    return GpuClock(model, gpu, tensor_parallel, **{**SMALL, **options})


def test_attention_is_the_measured_time_of_all_layers():
    """Two equal batches whose steps differ in nothing but the context."""
    found = gpu_times.rows(
        "attention", gpu="H100-SXM", kernel="flash_attn3", phase="decode", head_dim=128,
        q_heads=32, kv_heads=8, kv_dtype="bfloat16", batch_size=32,
    ).set_index("context_tokens")["microseconds"]  # fmt: skip
    difference = clock().seconds([16384] * 32) - clock().seconds([1024] * 32)
    assert difference == pytest.approx(32 * (found[16384] - found[1024]) * 1e-6, rel=0.01)


def test_unequal_contexts_take_as_long_as_the_longest_alone_and_less_than_all_long():
    mixed, long = clock()._decode_seconds([60_000] + [10] * 31), clock()._decode_seconds([60_000])
    assert mixed == pytest.approx(long)
    assert mixed < 0.5 * clock()._decode_seconds([60_000] * 32)


def test_a_chunk_behind_a_prefix_takes_as_long_as_a_prompt_of_equal_work():
    # 128 queries on 128 * 504 + 128 * 129 / 2 pairs: what the last 128 of 632 tokens see.
    behind = clock().seconds([], [(128, 632)])
    whole = clock(max_num_batched_tokens=1024)
    equal = (2 * (128 * 504 + 128 * 129 / 2)) ** 0.5
    by_hand = whole._prefill(batch_size=1, context_tokens=equal)
    at_start = whole._prefill(batch_size=1, context_tokens=(128 * 129) ** 0.5)
    assert behind - clock().seconds([], [(128, 128)]) == pytest.approx(32 * (by_hand - at_start))
    assert clock().seconds([], [(128, 131_072)]) > clock().seconds([], [(128, 65_536)])


def test_host_time_swaps_and_copies_are_added():
    busy = Step(swap_out=[(0, 0)] * 3, swap_in=[(1, 1)], copies=[(2, 3)])
    block = 16 * 131_072  # 32 layers of 8 KV heads of 128 in bf16, K and V
    by_hand = block * (4 / 64e9 + 2 / 3.35e12)
    assert clock().duration(busy) == pytest.approx(by_hand)
    swaps = clock(transfer_seconds=1e-5).duration(busy) - by_hand
    assert swaps == pytest.approx(2 * 32 * 4 * 1e-5)  # K and V of 32 layers, 4 blocks
    late = clock(host_seconds=0.25)
    assert late.seconds([100]) == pytest.approx(0.25 + clock().seconds([100]))


def test_a_slower_memory_slows_decoding_by_its_ratio_and_prompts_less():
    fast, slow = (clock("opt-13b", gpu) for gpu in ("A100-SXM", "A100-SXM-40GB"))
    assert slow.seconds([500]) / fast.seconds([500]) == pytest.approx(2.039 / 1.555, rel=0.02)
    prompt = [(256, 256)]
    assert 1.05 < slow.seconds([], prompt) / fast.seconds([], prompt) < 1.25


def test_beyond_the_table_time_grows_as_between_its_two_last_rows():
    t32, t64, t96, t128 = (clock()._decode_seconds([n * 1024]) for n in (32, 64, 96, 128))
    assert t128 - t64 == pytest.approx(2 * (t64 - t32), rel=1e-3)
    assert t96 == pytest.approx((t64 + t128) / 2, rel=1e-3)
    assert clock().seconds([], [(256, 131_072)]) > clock().seconds([], [(256, 130_000)])


def test_the_same_rule_one_row_shorter_misses_the_longest_rows_by_as_much_as_the_docs_say():
    errors = {}
    for model, card, parts in itertools.product(MODELS, CARDS, (1, 2, 4, 8)):
        with contextlib.suppress(ValueError):  # a shape that was not measured
            times = clock(model.model, card.card, parts)._decode
            x0, x1, x2 = times.axes["context_tokens"][-3:]
            t0, t1, t2 = (times(batch_size=[1, 2, 4, 8], context_tokens=x) for x in (x0, x1, x2))
            errors[times.what] = abs((t1 + (t1 - t0) * (x2 - x1) / (x1 - x0)) / t2 - 1)
    found = pd.DataFrame(errors)
    h100 = found.filter(like="H100")
    for tables, mean, most in (
        (found, 0.105, 0.738),
        (h100, 0.053, 0.324),
        (h100.filter(like=", 32, 8"), 0.037, 0.094),  # Llama 3.1 8B
    ):
        assert [tables.stack().mean(), tables.stack().max()] == pytest.approx(
            [mean, most], abs=1e-3
        )
    assert found.stack().median() == pytest.approx(0.029, abs=1e-3)
    assert "L40S" in found.max().idxmax()


WEIGHTS = {"opt-13b": 12.6e9, "llama-13b": 12.7e9, "llama-3.1-8b": 7.0e9, "llama-3.1-70b": 68e9}
WEIGHTS |= {"qwen3-0.6b": 0.44e9}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.card)
@pytest.mark.parametrize("model", [model.model for model in MODELS])
def test_no_step_is_faster_than_its_weights_can_be_read(model, card):
    assert clock(model, card.card).seconds([100]) > 2 * WEIGHTS[model] / card.bandwidth


def test_an_engine_on_the_clock_takes_the_sum_of_its_steps():
    manager = make_manager("vllm_v1", num_blocks=64, block_size=16)
    engine = open_loop.engine_without_model(manager, max_model_len=256, **SMALL)
    run = open_loop.serve(engine, [[1] * 100], [3], [0.0], service=clock())
    steps = [clock().seconds([], [(100, 100)], 1), clock().seconds([101]), clock().seconds([102])]
    assert [step.seconds for step in run.steps] == pytest.approx(steps)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("llama-9b", "H100-SXM"), {}, "^model='llama-9b' .* table models; it has llama-13b, ll"),
        (("opt-13b", "V100"), {}, "^card='V100' is not in the table cards; it has A100-SXM, "),
        (("llama-3.1-8b", "H100-SXM", 3), {}, "^num_gpus=3 is not in .* it has 2, 4, 8$"),
        (("opt-13b", "A100-SXM", 8), {}, "^q_heads=5 is not in the table attention .* it has 1, 2"),
        (("opt-13b", "A100-SXM"), {"max_num_batched_tokens": 8193}, "^m=8193 .* m from 1 to 8192$"),
        (("opt-13b", "A100-SXM"), {"host_seconds": -1}, "^host_seconds=-1: needs a finite"),
        (("opt-13b", "A100-SXM"), {"transfer_seconds": 1e999}, "^transfer_seconds=inf: needs"),
    ],
)
def test_what_was_not_measured_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        GpuClock(*arguments, **options)


def test_steps_beyond_the_tables_name_the_range():
    with pytest.raises(ValueError, match=r"^a context of 131073 tokens: llama.* to 131072$"):
        clock().seconds([131_073])
    with pytest.raises(ValueError, match=r"^a step of 257 tokens .* this clock has at most 256"):
        clock().seconds([], [(257, 257)], 1)
