"""No request can end another or change its tokens, whatever its parameters, prompt and text are."""

import functools
import math
import operator
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cache import UnsupportedByDesign
from models import LLM, FinishReason, SaltedPrompt, SamplingParams
from models.streams import OutputDecoder
from tests.models.tiny import tiny_config

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["", "a", "b ", " ", "\u2581", "\u2581a", "##s", "a</w>", "\ufffd", "\u20ac", "'", "\n"]
SPACES = decoders.Replace("\u2581", " ")
DECODERS = {
    "none": None,
    "bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    "llama": decoders.Sequence(
        [SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(),
    "bpe": decoders.BPEDecoder(),
    "byte_level": decoders.ByteLevel(),
    "panics": decoders.Strip(" ", 0, 1),  # at an empty token
}


def make_tokenizer(name: str) -> Tokenizer:
    """256 bytes, the words, and two special tokens."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet()) if name == "byte_level" else BYTES
    vocabulary = {token: i for i, token in enumerate([*bytes_, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = DECODERS[name]
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


TOKENIZERS = {name: make_tokenizer(name) for name in DECODERS}
VOCAB_SIZE = 256 + len(WORDS) + 2
TOKENS = st.one_of(
    st.integers(0, VOCAB_SIZE - 1),
    st.sampled_from([0x0A, 0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC]),  # and characters of several
    st.integers(256, VOCAB_SIZE - 1),
)


@given(st.sampled_from(sorted(DECODERS.keys() - {"panics"})), st.lists(TOKENS), st.booleans())
@settings(max_examples=500)
def test_pieces_add_up_to_the_decoded_tokens(name, token_ids, skip_special_tokens):
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    decode, text, pending = OutputDecoder(TOKENIZERS[name], params), "", ""
    for i, token in enumerate(token_ids):
        settled, pending = decode([token])
        text += settled
        expected = TOKENIZERS[name].decode(
            token_ids[: i + 1], skip_special_tokens=skip_special_tokens
        )
        assert text + pending == expected
    assert "".join(OutputDecoder(TOKENIZERS[name], params)(token_ids)) == text + pending


@functools.cache
def make_llm(manager: str = "vllm_v1", overlap: bool = False) -> LLM:
    """An LLM whose tokens are bytes of text."""
    options = {"manager": manager, "overlap": overlap, "num_blocks": 40, "block_size": 4}
    options["max_model_len"] = 48
    llm = LLM(tiny_config(vocab_size=VOCAB_SIZE), **options)
    llm.tokenizer = TOKENIZERS["bytes"]
    llm.engine.new_decoder = partial(OutputDecoder, llm.tokenizer)
    return llm


OTHER, SEEDED = [7, 8, 9, 10, 11], SamplingParams(seed=3, max_tokens=8)


@functools.cache
def alone() -> list[int]:
    return make_llm().generate(OTHER, SEEDED)[0].outputs[0].token_ids


def serve_beside_another(llm: LLM, prompt, params: SamplingParams):
    """Serve a request between two tokens of another one; returns its events."""
    other = llm.stream(OTHER, SEEDED)
    first, events = next(other), []
    try:
        events += llm.stream([prompt], params)
    finally:  # refused or not
        *tokens, last = other
        assert (
            last.outputs[0].token_ids == [token.token_id for token in (first, *tokens)] == alone()
        )
        assert not llm.engine.has_unfinished
        llm.manager.check_invariants()
        assert llm.manager.num_free_blocks == llm.manager.num_blocks
    return events


ODD = [
    None, True, False, 0, 1, -1, 3, 2**63, 2**64, 10**30, 10**400, -(10**5000), 0.5, 1.0, 5e-324,
    1e-6, 1e308, math.inf, math.nan, 1j, "", "a", b"a", "\ud800", [], {}, [[]], np.float32(0.5),
    np.int64(2), np.bool_(True), np.array([1, 2]), Fraction(1, 3), Decimal(1), torch.tensor(1),
]  # fmt: skip
STOPS = [
    "\n", "\ufffd", "</s>", ["a", "\ud800"], [""], [b"a"], {"x": 1}, ("b", 1), [257], {1, 258},
    range(VOCAB_SIZE), [10**30], [-1], [True], [2.0],
]  # fmt: skip


def accepted(name: str) -> list:
    """Odd values of a field that SamplingParams accepts.  The rest raise ValueError."""
    values = []
    for value in ODD + STOPS:
        try:
            SamplingParams(**{name: value})
            values.append(value)
        except ValueError as error:
            assert str(error).startswith(f"{name}=")  # noqa: PT017
    return values


FIELDS = {name: st.sampled_from(accepted(name)) for name in SamplingParams.__dataclass_fields__}
SALTED = [SaltedPrompt(OTHER, ""), SaltedPrompt("a", b"\xff"), SaltedPrompt([1], "a" * 9)]
PROMPTS = st.sampled_from(
    [
        *ODD, *SALTED, [VOCAB_SIZE], [-1], [2**32], [10**5000], [1.5], ["a"], [None], range(5),
        (1, 2), OTHER, [3] * 99, "ab", np.array([1.0]), torch.tensor([4, 5]),
    ]
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:request")
@settings(max_examples=40)
@given(
    st.sampled_from(["vllm_v1", "radix", "nano_vllm", "vllm_v0"]),
    st.booleans(),
    st.sets(st.sampled_from(sorted(FIELDS)), max_size=3).flatmap(
        lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
    ),
    st.just(OTHER) | st.just("ab") | PROMPTS,
)
def test_a_request_is_refused_or_served(manager, overlap, fields, prompt):
    try:
        params = SamplingParams(**{"max_tokens": 9} | fields)
        *tokens, last = serve_beside_another(make_llm(manager, overlap), prompt, params)
    except ValueError:
        return
    except UnsupportedByDesign:
        assert manager == "nano_vllm"
        assert params.beam_width is not None
        return
    errors = [output for output in last.outputs if output.finish_reason == "error"]
    assert bool(errors) == (last.error is not None) == last.stats.was_aborted
    for output in last.outputs:
        pieces = [token.text for token in tokens if token.index == output.index]
        if params.beam_width is None and last.error is None:
            assert "".join(pieces) == output.text
        assert not any(stop in output.text for stop in params.stop) or params.min_tokens


PROMPT = [1, 2, 3]
PLAIN, BEAMS = SamplingParams(n=2, max_tokens=9), SamplingParams(beam_width=2, max_tokens=9)
FAULTS = {
    "hashing": ("manager.find", PLAIN, lambda seq: is_ours(seq)),
    "sampling": ("sampler.draw", PLAIN, lambda logits, rows, seqs: any(map(is_ours, seqs))),
    "scores": ("sampler.topk_logprobs", BEAMS, lambda logits, row, seq, count: is_ours(seq)),
    "logprobs": ("sampler.logprobs", SamplingParams(logprobs=7), lambda *_: _[-1] == 7),
    "text behind logprobs": (
        "_text_of", SamplingParams(logprobs=1, stop="x"), lambda seq: is_ours(seq) and seq.text
    ),
    "beams": ("_advance", BEAMS, lambda search, now: is_ours(search.beams[0])),
    "text": ("new_decoder", SamplingParams(top_k=3), lambda params: params.top_k == 3),
    "stop": (
        "new_decoder", SamplingParams(stop_token_ids=range(VOCAB_SIZE), top_p=0.5),
        lambda params: params.stop_token_ids,
    ),
}  # fmt: skip


def is_ours(seq) -> bool:
    return seq.request.prompt_token_ids == PROMPT


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_its_own_work_ends_a_request_alone(fault, overlap, monkeypatch):
    llm = make_llm(overlap=overlap)
    path, params, is_faulty = FAULTS[fault]
    call = operator.attrgetter(path)(llm.engine)

    def fail(*arguments):
        if is_faulty(*arguments):
            raise ArithmeticError("its own fault")
        return call(*arguments)

    with monkeypatch.context() as patch:
        owner, _, method = path.rpartition(".")
        patch.setattr(operator.attrgetter(owner)(llm.engine) if owner else llm.engine, method, fail)
        with pytest.warns(RuntimeWarning, match="ArithmeticError: its own fault"):
            *_, last = serve_beside_another(llm, PROMPT, params)
        if fault == "text":  # whole, at the end
            with pytest.warns(RuntimeWarning, match="ArithmeticError: its own fault"):
                assert llm.generate(PROMPT, params)[0].error == last.error
    assert last.error == "ArithmeticError: its own fault"
    assert all(output.finish_reason is FinishReason.ERROR for output in last.outputs)
    assert serve_beside_another(llm, PROMPT, params)[-1].error is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_that_cannot_be_sampled_is_sampled_one_by_one(overlap, monkeypatch):
    """Only what fails for all requests is raised."""
    llm = make_llm(overlap=overlap)
    draw, streams = llm.engine.sampler.draw, [llm.stream(p, PLAIN) for p in (OTHER, PROMPT)]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.sampler, "draw", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(streams[0])
        patch.setattr(llm.engine.sampler, "draw", lambda *a: draw(*a) if len(a[1]) == 1 else 1 / 0)
        assert serve_beside_another(llm, PROMPT, SEEDED)[-1].error is None


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_ends_no_other_request(monkeypatch):
    llm, decoder = make_llm(), make_llm().engine.new_decoder
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "new_decoder", lambda p: 1 / 0 if p.stop else decoder(p))
        last = serve_beside_another(llm, PROMPT, SamplingParams(stop="x"))[-1]
    assert last.error == "ZeroDivisionError: division by zero"


def test_a_decoder_that_panics_is_an_error():
    decode = OutputDecoder(TOKENIZERS["panics"], PLAIN)
    with pytest.raises(ValueError, match="output: index out of bounds"):
        decode([TOKENIZERS["panics"].token_to_id("")])
