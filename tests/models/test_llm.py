"""LLM on tiny checkpoints: the tokens of transformers, whatever the cache does."""

import copy
import functools
import math
import pickle
import shutil
import types
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from cache import MANAGERS, Sequence
from cache.managers import manager_class
from models import LLM, FinishReason, LLMOptions, RequestOutput, SamplingParams
from models.attention import FlashAttnBackend
from models.generate import main
from tests.models.tiny import tiny_config, tokens_of

MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SHARED = [(i * 37 + 11) % 97 for i in range(26)]
PROMPTS = [SHARED, [5], [*SHARED[:21], 1, 2, 3], [(i * 5) % 97 for i in range(17)], SHARED]


SCARCE = [
    (1, 9, True, "qwen3"), (4, 64, True, "gemma2"),
    (7, 9, False, "mistral"), (16, 64, True, "qwen2"),
]  # fmt: skip
"""Block size, chunk, prefix caching and checkpoint."""
OTHERS = {"qwen3": "smollm3", "gemma2": "gemma3", "mistral": "phi3", "qwen2": "gemma"}
"""The checkpoint of every other manager, by the one of SCARCE."""
PREEMPTIONS = ("recompute", "swap")
PAIRWISE = [
    (name, *sizes, OTHERS[checkpoint] if i % 2 else checkpoint,
     PREEMPTIONS[(i + j + 1) % 2], bool((i + j // 2) % 2))
    for i, name in enumerate(sorted(MANAGERS))
    for j, (*sizes, checkpoint) in enumerate(SCARCE)
]  # fmt: skip
"""Every manager with each of SCARCE, both preemptions and both values of overlap."""


def scarce(manager, block_size, chunk, caching, **options) -> dict:
    """Options of an LLM whose cache has too few blocks for all prompts at a time."""
    num_slots = 48
    if manager == "contiguous":
        num_slots, options["manager_options"] = 64, {"reservation": "pow2"}
    return dict(
        manager=manager,
        block_size=block_size,
        num_blocks=-(-num_slots // block_size),
        max_num_batched_tokens=chunk if MANAGERS[manager].can_chunk else 64,
        enable_prefix_caching=caching,
        **options,
    )


@pytest.mark.parametrize(
    ("manager", "block_size", "chunk", "caching", "checkpoint", "preemption", "overlap"), PAIRWISE
)
def test_tokens_are_those_of_transformers(
    manager, block_size, chunk, caching, checkpoint, preemption, overlap, make_llm, expected
):
    options = scarce(manager, block_size, chunk, caching, preemption=preemption, overlap=overlap)
    options["scheduling"] = "mixed" if overlap else "prefill_first"
    llm = make_llm(checkpoint, **options)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == expected(checkpoint)
    spares = manager == "contiguous"  # it reserves the whole output beforehand
    # It frees the blocks behind the window.
    spares |= bool(llm.config.sliding_window) and (manager, preemption) == ("vllm_v1", "recompute")
    assert (sum(output.stats.num_preemptions for output in outputs) == 0) == spares
    llm.manager.check_invariants()
    assert llm.manager.num_free_blocks == llm.manager.num_blocks


def test_a_manager_of_ones_own_serves(make_llm, expected, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from cache.managers.paged import Paged\nclass Mine(Paged): 'Mine.'\n")
    for manager in (f"{file}:Mine", manager_class(f"{file}:Mine")):
        llm = make_llm(manager=manager, block_size=4, num_blocks=16)
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected("llama")
        assert llm.manager.name == "Mine"


@pytest.fixture(scope="module")
def fp8_tokens(make_llm):
    """fp8_tokens(checkpoint) -> the tokens with an fp8 cache without preemption."""

    def generate(checkpoint):
        llm = make_llm(checkpoint, kv_cache_dtype="fp8_e4m3", num_blocks=100)
        assert llm.engine.runner.kv_cache.dtype == torch.float8_e4m3fn
        outputs = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        return tokens_of(outputs)

    return functools.cache(generate)


@pytest.mark.parametrize(
    ("manager", "block_size", "chunk", "caching", "checkpoint", "preemption"),
    [("vllm_v1", *SCARCE[0], "swap"), ("vllm_v0", *SCARCE[1], "swap"),
     ("radix", *SCARCE[2], "swap"), ("nano_vllm", *SCARCE[3], "recompute")],
)  # fmt: skip
def test_an_fp8_cache_gives_the_same_tokens_however_it_is_managed(
    manager, block_size, chunk, caching, checkpoint, preemption, make_llm, fp8_tokens
):
    """Queries read the stored keys and values of their own chunk, too."""
    options = scarce(manager, block_size, chunk, caching, preemption=preemption)
    outputs = make_llm(checkpoint, kv_cache_dtype="fp8_e4m3", **options).generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == fp8_tokens(checkpoint)
    stats = [output.stats for output in outputs]
    assert any(one.num_preemptions for one in stats)
    assert any(one.num_swapped_tokens for one in stats) == (preemption == "swap")


def test_an_fp8_cache_changes_tokens(fp8_tokens, expected):
    """Otherwise the tests above could not fail."""
    assert fp8_tokens("llama") != expected("llama")


def test_the_kernels_give_the_same_tokens_of_an_fp8_cache(make_llm, fp8_tokens):
    options = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "triton", "preemption": "swap"}
    llm = make_llm("qwen3", block_size=3, num_blocks=24, max_num_batched_tokens=20, **options)
    outputs = llm.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=3))
    assert tokens_of(outputs) == [output[:3] for output in fp8_tokens("qwen3")[:3]]


def test_flash_attn_has_no_fp8_cache(make_llm, monkeypatch):
    backend = types.SimpleNamespace(name="flash_attn", has_fp8_cache=FlashAttnBackend.has_fp8_cache)
    monkeypatch.setattr("models.llm.make_backend", lambda name, device: backend)
    with pytest.raises(ValueError, match="'fp8_e4m3': attention_backend='flash_attn' has no fp8"):
        make_llm(kv_cache_dtype="fp8_e4m3", attention_backend="flash_attn")


def test_an_fp8_cache_is_sized_by_its_bytes(make_llm, monkeypatch):
    """The model has 2 layers and 2 KV heads of head_dim 16."""
    monkeypatch.setattr("models.llm.HOST_KV_CACHE_BYTES", 100 * 4 * 2 * 2 * 2 * 16)
    assert make_llm(block_size=4).manager.num_blocks == 25
    llm = make_llm(block_size=4, kv_cache_dtype="fp8_e4m3", preemption="swap")
    assert llm.manager.num_blocks == 100
    assert llm.engine.runner.host_cache.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(("available", "num_blocks"), [(4 * 25 * 2048, 25), (1 << 40, 256 * 64)])
def test_a_cache_on_a_cpu_takes_a_quarter_of_what_is_available_at_most(
    available, num_blocks, make_llm, monkeypatch
):
    """A block of 4 tokens takes 2,048 bytes."""
    monkeypatch.setattr("models.llm.available_host_bytes", lambda: available)
    llm = make_llm(block_size=4, preemption="swap")
    assert llm.manager.num_blocks == num_blocks
    assert llm.engine.runner.host_cache.shape[2] == num_blocks
    monkeypatch.setattr("models.llm.available_host_bytes", lambda: 4 * 2047)
    with pytest.raises(ValueError, match=r"block_size=4: a block needs 2,048 .* 8,188 available"):
        make_llm(block_size=4)


@pytest.mark.parametrize(
    ("params", "overlap"),
    [(GREEDY, False), (SamplingParams(seed=1), True),
     (SamplingParams(beam_width=2, max_tokens=4), True)],
)  # fmt: skip
def test_logits_that_are_not_numbers_end_their_request_alone(params, overlap, make_llm):
    llm = make_llm(num_blocks=20, overlap=overlap)
    [expected] = llm.generate([1, 2, 3], params)
    bad = 95 if params.beam_width else 60  # not generated
    with torch.inference_mode():
        llm.model.model.embed_tokens.weight[bad] = math.nan
    assert not any(bad in output.token_ids for output in expected.outputs)
    with pytest.warns(RuntimeWarning, match="request 2: logits are NaN or infinite after"):
        sound, failed = llm.generate([[1, 2, 3], [1, 2, bad]], params)
    assert [o.token_ids for o in sound.outputs] == [o.token_ids for o in expected.outputs]
    assert {output.finish_reason for output in failed.outputs} == {FinishReason.ERROR}
    assert not llm.engine.has_unfinished
    llm.manager.check_invariants()
    assert llm.manager.num_free_blocks == 20


def test_scales_of_the_checkpoint(make_llm, llama_copy):
    """A cache that holds halves with a scale of 2 gives the tokens of one with a scale of 1."""
    llm = make_llm(kv_cache_dtype="fp8_e4m3", num_blocks=20)
    unscaled = llm.generate(SHARED, GREEDY)
    before = llm.engine.runner.kv_cache.float()
    names = [
        f"model.layers.{layer}.self_attn.{part}.{kind}_scale"
        for layer, part, kind in [(0, "k_proj", "k"), (0, "v_proj", "v"), (1, "attn", "v")]
    ]
    scales = [torch.tensor(2.0), torch.tensor([2.0]), torch.tensor(2.0)]
    save_file(dict(zip(names, scales, strict=True)), llama_copy / "scales.safetensors")
    llm = LLM(llama_copy, kv_cache_dtype="fp8_e4m3", num_blocks=20)
    assert tokens_of(llm.generate(SHARED, GREEDY)) == tokens_of(unscaled)
    # Halves of numbers below 2^-5 are subnormal in e4m3 and lose a bit.
    after = llm.engine.runner.kv_cache.float()
    torch.testing.assert_close(after[:, 0] * 2, before[:, 0], rtol=0.08, atol=2**-8)
    torch.testing.assert_close(after[1, 1] * 2, before[1, 1], rtol=0.08, atol=2**-8)
    torch.testing.assert_close(after[0, 1], before[0, 1], rtol=0.08, atol=2**-8)
    assert tokens_of(LLM(llama_copy).generate(SHARED, GREEDY))  # ignored without an fp8 cache


@pytest.mark.parametrize(("checkpoint", "num_blocks"), [("llama", 12), ("gemma3", 44)])
@pytest.mark.parametrize("store", ["through", "selective", "back"])
def test_a_tier_changes_no_token(checkpoint, num_blocks, store, make_llm, expected):
    tier = {"host_blocks": 60, "store": store}
    llm = make_llm(checkpoint, block_size=4, num_blocks=num_blocks, manager_options=tier)
    assert tokens_of(llm.generate(PROMPTS * 3, GREEDY)) == expected(checkpoint) * 3
    assert llm.manager.stats.loaded_blocks > 10


def test_a_tier_is_checked_before_the_model_is_made(make_llm, monkeypatch):
    monkeypatch.delattr("models.llm.build_model")
    for tier, message in (
        ({"host_blocks": 10**9}, "host_blocks=1000000000 need .* bytes of host memory, .* are"),
        ({"host_blocks": 4, "store": "never"}, "store='never': choose from through"),
    ):
        with pytest.raises(ValueError, match=message):
            make_llm(manager_options=tier)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("stops", [None, [3, 10, 20, 30, 40, 50, 60, 70]], ids=["", "with_eos"])
def test_beam_search_is_that_of_transformers(stops, length_penalty, make_checkpoint):
    folder, oracle = make_checkpoint("llama")
    llm = LLM(folder, block_size=4, num_blocks=64)
    params = SamplingParams(
        n=3, beam_width=4, max_tokens=9, length_penalty=length_penalty, stop_token_ids=stops or ()
    )
    for prompt, output in zip(PROMPTS[:3], llm.generate(PROMPTS[:3], params), strict=True):
        search = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": length_penalty}
        search |= {"do_sample": False, "early_stopping": False, "max_new_tokens": 9}
        search |= {"eos_token_id": stops, "pad_token_id": 0, "output_scores": True}
        theirs = oracle.generate(torch.tensor([prompt]), **search, return_dict_in_generate=True)
        for completion, ids, score in zip(
            output.outputs, theirs.sequences.tolist(), theirs.sequences_scores, strict=True
        ):
            generated = ids[len(prompt) :]
            ends = [i + 1 for i, token in enumerate(generated) if token in (stops or ())]
            assert completion.token_ids == generated[: min(ends, default=9)]
            ours = completion.cumulative_logprob / len(completion.token_ids) ** length_penalty
            torch.testing.assert_close(torch.tensor(ours), score, rtol=1e-5, atol=1e-5)
    assert llm.manager.stats.copied_blocks > 0
    assert llm.manager.num_free_blocks == 64


def test_abort_within_a_stream(make_llm, expected):
    llm = make_llm(block_size=4, num_blocks=64)
    done = {}
    for event in llm.stream(PROMPTS[:2], GREEDY):
        if isinstance(event, RequestOutput):
            done[event.request_id] = event.outputs[0]
        elif event.request_id == 0 and 0 not in done and event.token_id == expected("llama")[0][2]:
            llm.abort(0)
    assert done[0].finish_reason is FinishReason.ABORT
    assert done[0].token_ids == expected("llama")[0][: len(done[0].token_ids)] != []
    assert done[1].token_ids == expected("llama")[1]
    with pytest.raises(KeyError):
        llm.abort(0)


@pytest.mark.parametrize(
    ("config", "params"),
    [(None, SamplingParams(max_tokens=6)), (tiny_config(initializer_range=0.3), GREEDY)],
    ids=["unseeded requests", "random weights"],
)
def test_the_seed_of_the_llm_fixes(config, params, make_checkpoint):
    model = config or make_checkpoint("llama")[0]
    first, again, other = (
        tokens_of(LLM(model, seed=seed).generate(PROMPTS, params)) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 1, "block_size": 1}, "num_blocks=1 holds a sequence of 1 tokens; needs"),
        ({"num_blocks": 4, "max_model_len": 65}, "max_model_len=65: the KV cache .* 64 tokens"),
        ({"max_model_len": 257}, "max_model_len=257: the model has 256 positions"),
        ({"manager": "vllm"}, "manager='vllm' is unknown"),
        ({"manager": "mine.py:Mine"}, "manager='mine.py:Mine': there is no file mine.py"),
        ({"policy": "best"}, "best"),
        ({"preemption": "drop"}, "preemption='drop'"),
        ({"scheduling": "decode_first"}, "scheduling='decode_first': choose from mixed, prefill"),
        ({"block_size": 0}, "block_size=0"),
        ({"num_blocks": 2.5}, "num_blocks=2.5"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': choose from None, fp8_e4m3"),
        ({"dtype": torch.float64}, "dtype=torch.float64"),
        ({"device": "cuda"}, "device='cuda': there is no GPU here"),
        ({"device": "gpu"}, "device='gpu': choose from cpu, cuda"),
        ({"seed": None}, "seed=None: needs an int"),
        ({"overlap": "no"}, "overlap='no': choose from None, True, False"),
        ({"enforce_eager": None}, "enforce_eager=None: choose from True, False"),
        ({"enforce_eager": True, "cuda_graphs": True}, "enforce_eager=True is cuda_graphs=False"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: needs a number above 0"),
        ({"cuda_graphs": True}, "cuda_graphs=True: cannot capture attention_backend='torch'"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide num_q_heads=4"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size=8 does not divide num_q_heads=4"),
        ({"manager_options": {"watermark": 0.1}}, "no option watermark"),
        ({"manager_options": {"host_blocks": 4}, "preemption": "swap"}, "'swap': manager_options"),
        ({"manager": "vllm_v0", "manager_options": {"num_cpu_blocks": 4}}, "by num_host_blocks"),
        ({"manager_options": {"sliding_window": 32}}, "sliding_window=32: the window is the model"),
        ({"manager": "contiguous", "block_size": 4, "num_blocks": 11, "max_model_len": 48},
         "max_model_len=48: .*num_blocks=11 blocks has 32 slots"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_named(options, message, make_llm):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=message):
        make_llm(**options)


@pytest.mark.parametrize(
    ("kind", "name", "advice"),
    [
        (LLM, "num_kvcache_blocks", "use num_blocks"),
        (LLM, "quantization", "no option does the same, so leave it out"),
        (LLM, "temperature", "SamplingParams has it"),
        (LLM, "max_model_length", r"did you mean max_model_len\? choose from device, dtype, "),
        (SamplingParams, "best_of", "use n with logprobs=0, and rank the outputs by cumulative_"),
        (SamplingParams, "prompt_logprobs", "no option does the same, so leave it out"),
        (SamplingParams, "num_blocks", "LLM has it"),
        (SamplingParams, "x", "choose from n, temperature, top_k, top_p,"),
    ],
)
def test_unknown_options_are_explained(kind, name, advice):
    make = functools.partial(LLM, tiny_config()) if kind is LLM else kind
    with pytest.raises(TypeError, match=f"^{kind.__name__} has no option {name}; {advice}"):
        make(**{name: 1})


def test_names_and_values_of_vllm_are_served():
    asked = LLMOptions(dtype="auto", kv_cache_dtype="auto", enforce_eager=True)
    assert (asked.dtype, asked.kv_cache_dtype, asked.cuda_graphs) == (None, None, False)


def test_more_positions_than_rope_tells_apart_need_a_longest_sequence():
    config = tiny_config(max_position_embeddings=10**12)
    with pytest.raises(ValueError, match=r"max_position_embeddings=10{12}: .* give a max_model_"):
        LLM(config, num_blocks=20)
    assert LLM(config, num_blocks=20, max_model_len=64).max_model_len == 64


def test_prompts_and_parameters_that_do_not_fit_are_named(text_checkpoint):
    llm = LLM(text_checkpoint, num_blocks=4)
    for prompts, params, message in (
        ([[1], [2] * 64], GREEDY, r"prompts\[1\]: prompt: has 64 tokens; needs at most 63"),
        ([b"abc"], GREEDY, r"prompts\[0\]: prompt: got bytes, b'abc'"),
        ("a\ud800", GREEDY, "surrogates not allowed"),
        ([[1], [2], [3]], [GREEDY] * 2, "sampling_params: 2 for 3 prompts; needs one for all, or"),
        ([[1]], [7], r"sampling_params\[0\]=7: needs SamplingParams"),
        ([], 7, "sampling_params=7: needs SamplingParams"),
        ([1], SamplingParams(logit_bias={97: 1}), "logit_bias: token id 97; needs ids from 0 to 9"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, params)
    assert not llm.engine.has_unfinished
    llm.tokenizer = None
    with pytest.raises(ValueError, match=r"prompts\[0\]: prompt: a text needs a tokenizer\.json"):
        llm.generate("Hello", GREEDY)
    with pytest.raises(ValueError, match="use_tqdm=1: needs True or False"):
        llm.generate([1], GREEDY, 1)


def test_priorities_need_a_scheduler_that_reads_them(make_llm):
    """The last prompt is served first; a later one waits for a smaller priority."""
    options = {"num_blocks": 20, "max_num_seqs": 1, "scheduling_policy": "priority"}
    events = make_llm(**options).stream(PROMPTS[:3], GREEDY, priority=[2, 1, 0])
    assert [e.request_id for e in events if isinstance(e, RequestOutput)] == [2, 1, 0]
    with pytest.raises(ValueError, match=r"prompts\[1\]: priority=1: needs 0, or a Scheduler"):
        make_llm(num_blocks=20).generate(PROMPTS[:2], GREEDY, priority=[0, 1])


def test_a_folder_without_weights(make_checkpoint, tmp_path):
    shutil.copy(make_checkpoint("llama")[0] / "config.json", tmp_path)
    with pytest.raises(ValueError, match="no weights"):
        LLM(tmp_path)
    assert LLM(tmp_path, random_weights=True).max_model_len == 256


def test_command_line(text_checkpoint, expected, capsys):
    arguments = ["--model", str(text_checkpoint), "--temperature", "0", "--max-tokens", "10"]
    assert main([*arguments, "--prompt", "w5", "--prompt-ids", "5", "--num-blocks", "8"]) == 0
    printed = capsys.readouterr().out
    text = " ".join(f"w{token}" for token in expected("llama")[1])
    assert printed.count(f"output 0 (length): {text}\n") == 2
    assert "prompt: w5\n" in printed
    assert "prompt: [5]\n" in printed
    assert "1 prompt tokens, 0 of them cached; 10 tokens generated; first after" in printed


def test_the_command_line_says_which_beams_it_prints(text_checkpoint, capsys):
    arguments = "--prompt w1 --beam-width 3 --max-tokens 2 --num-blocks 20"
    assert main(["--model", str(text_checkpoint), *arguments.split()]) == 0
    printed = capsys.readouterr().out
    assert "prompt: w1\nbeam search: the best 1 of 3 beams; --n returns more\noutput 0" in printed
    assert "output 1" not in printed


def test_an_interrupt_of_the_command_line_is_one_line(text_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(LLM, "generate", mock.Mock(side_effect=KeyboardInterrupt))
    assert main(["--model", str(text_checkpoint), "--prompt", "w1"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model /nonexistent --prompt a", "no folder or GGUF file '/nonexistent'"),
        ("", "error: --prompt: needs at least one prompt"),
        ("--prompt w1 --n 0", "error: n=0"),
        ("--prompt-ids 1,x", "error: --prompt-ids '1,x'"),
        ("--chat --prompt-ids 3", "error: --chat: takes each --prompt as a message"),
        ("--prompt w1 --tensor-parallel-size 3", "error: tensor_parallel_size=3 does not divide"),
    ],
)
def test_command_line_errors(arguments, message, text_checkpoint, capsys):
    assert main(["--model", str(text_checkpoint), *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "reserved"),
    [(40, 64, 16), (33, 64, 16), (32, 64, 8), (None, 256, 64), (None, 8, 8), (None, 11, 8)],
)
def test_contiguous_reserves_for_the_longest_sequence(
    make_llm, max_model_len, num_blocks, reserved
):
    """In blocks of 4, a power of two: max_model_len, else what model and cache allow."""
    sizes = {"block_size": 4, "num_blocks": num_blocks, "max_model_len": max_model_len}
    llm = make_llm(manager="contiguous", **sizes)
    llm.manager.allocate(Sequence("any", [1, 2, 3]))
    assert llm.manager.num_blocks - llm.manager.num_free_blocks == reserved


def test_an_llm_has_a_repr_and_refuses_to_be_copied(make_llm):
    llm = make_llm("qwen3", num_blocks=9)
    text = "LLM(Qwen3ForCausalLM, torch.float32 on cpu, vllm_v1: 9 of 9 blocks of 16 tokens free, "
    assert repr(llm) == text + "max_model_len=144)"
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an LLM cannot be copied or pickled"):
            copy_of(llm)
