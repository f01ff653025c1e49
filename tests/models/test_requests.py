"""Options of requests, through LLM on tiny checkpoints."""

import dataclasses
import io
import itertools
import json
import math
import sys

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cache import POLICIES, SessionHint
from models import LLM, SaltedPrompt, SamplingParams, TokenOutput
from models.generate import main
from tests.models.tiny import LOGIT_ERROR, oracle_tokens, tiny_config, tokens_of

PROMPT = [(i * 37 + 11) % 97 for i in range(26)]
GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture(scope="module")
def llm(make_llm):
    return make_llm(num_blocks=64)


def test_a_repetition_penalty_is_that_of_transformers(llm, make_checkpoint):
    _, oracle = make_checkpoint("llama")
    theirs = oracle_tokens(oracle, PROMPT, 10, repetition_penalty=1.7)
    params = SamplingParams(temperature=0, max_tokens=10, repetition_penalty=1.7)
    plain = tokens_of(llm.generate(PROMPT, GREEDY))
    assert tokens_of(llm.generate(PROMPT, params)) == [theirs] != plain


BIAS = {5: 3.0, 60: -math.inf, 7: -2}


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"frequency_penalty": 1.5}, lambda counts: -1.5 * counts),
        ({"presence_penalty": 2.0}, lambda counts: -2 * (counts > 0)),
        ({"frequency_penalty": -0.5, "presence_penalty": 1.0}, lambda c: 0.5 * c - 1 * (c > 0)),
        ({"logit_bias": BIAS}, lambda _: torch.tensor([BIAS.get(i, 0.0) for i in range(97)])),
    ],
    ids=["frequency", "presence", "both", "bias"],
)
def test_penalties_and_biases_are_added_to_logits(options, change, llm, make_checkpoint):
    """A request of the same batch without them gets the same tokens as before."""
    _, oracle = make_checkpoint("llama")
    expected: list[int] = []
    for _ in range(20):
        with torch.no_grad():
            logits = oracle(torch.tensor([PROMPT + expected])).logits[0, -1]
        counts = torch.tensor(expected, dtype=torch.int64).bincount(minlength=97)
        expected.append(int((logits + change(counts)).argmax()))
    params = [SamplingParams(temperature=0, max_tokens=20, **options), GREEDY]
    plain = tokens_of(llm.generate(PROMPT, GREEDY))
    assert tokens_of(llm.generate([PROMPT, PROMPT], params)) == [expected, *plain]


def test_without_max_tokens_an_output_ends_with_the_context(make_llm):
    llm = make_llm(num_blocks=64, max_model_len=40)
    params = [SamplingParams(max_tokens=None, beam_width=width) for width in (None, 2)]
    outputs = llm.generate([PROMPT, PROMPT], params)
    assert [len(tokens) for tokens in tokens_of(outputs)] == [14, 14]


def test_min_tokens_puts_off_whatever_ends_an_output(llm):
    [plain] = llm.generate(PROMPT, GREEDY)
    stop = plain.outputs[0].token_ids[2]
    early = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[stop])
    assert len(llm.generate(PROMPT, early)[0].outputs[0].token_ids) == 3
    late = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[stop], min_tokens=6)
    tokens = llm.generate(PROMPT, late)[0].outputs[0].token_ids
    assert stop not in tokens[:6]
    assert tokens[:2] == plain.outputs[0].token_ids[:2]
    for stops in ([], [97, 10**9]):  # none, or none of the vocabulary
        params = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=stops, min_tokens=6)
        assert llm.generate(PROMPT, params)[0].outputs == plain.outputs


def test_parameters_and_ends_of_the_checkpoint_are_the_default(llm, llama_copy):
    path = llama_copy / "generation_config.json"
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 5, "top_p": null}')
    assert LLM(llama_copy).default_sampling_params == SamplingParams(temperature=0.6, top_k=5)
    [tokens] = tokens_of(llm.generate(PROMPT, GREEDY))
    for max_tokens, count, reason in ((10, 3, "stop"), (2, 2, "length")):
        fields = {"do_sample": False, "temperature": 0.6, "max_new_tokens": max_tokens}
        path.write_text(json.dumps(fields | {"eos_token_id": [tokens[2]]}))
        [output] = LLM(llama_copy, num_blocks=64).generate(PROMPT)[0].outputs
        assert (output.token_ids, output.finish_reason) == (tokens[:count], reason)
    path.write_text('{"top_p": 2}')
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p=2: needs"):
        LLM(llama_copy)


def test_logprobs_are_those_of_the_model(llm, make_checkpoint):
    """Before temperature and penalties; of the chosen token as well as of the likeliest."""
    params = SamplingParams(n=2, temperature=2.0, seed=3, max_tokens=8, logprobs=3, min_p=0.01)
    [output] = llm.generate(PROMPT, params)
    _, oracle = make_checkpoint("llama")
    for sample in output.outputs:
        with torch.no_grad():
            logits = oracle(torch.tensor([PROMPT + sample.token_ids])).logits[0, len(PROMPT) - 1 :]
        expected = logits.log_softmax(-1)
        for row, token, logprobs in zip(expected, sample.token_ids, sample.logprobs, strict=False):
            assert set(logprobs) == {*row.topk(3).indices.tolist(), token}
            for chosen, value in logprobs.items():
                assert value == pytest.approx(row[chosen].item(), abs=1e-4)
        own = [p[token] for p, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert sample.cumulative_logprob == pytest.approx(sum(own))
    streamed = [e for e in llm.stream(PROMPT, params) if isinstance(e, TokenOutput)]
    for event, logprobs in zip(  # the prompt is now found in the cache: other sums
        [e for e in streamed if e.index == 1], output.outputs[1].logprobs, strict=True
    ):
        assert event.logprobs == pytest.approx(logprobs, abs=4 * LOGIT_ERROR)
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].logprobs is None


def test_a_stop_string_may_be_a_special_token(text_checkpoint):
    [plain] = LLM(text_checkpoint, num_blocks=64).generate(PROMPT, GREEDY)
    words = plain.outputs[0].text.split()
    path = text_checkpoint / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([words[3]])
    tokenizer.save(str(path))
    llm = LLM(text_checkpoint, num_blocks=64)
    params = dataclasses.replace(GREEDY, stop=[words[3], "never"])
    [output] = llm.generate(PROMPT, params)[0].outputs
    assert (output.text.split(), output.finish_reason) == (words[:3], "stop")
    assert output.token_ids == plain.outputs[0].token_ids[:4]
    for shown, stops in ((words, ()), (words[:3], words[3])):
        params = dataclasses.replace(GREEDY, skip_special_tokens=False, stop=stops)
        *tokens, final = llm.stream(PROMPT, params)
        assert final.outputs[0].text.split() == shown
        assert final.outputs[0].finish_reason == ("stop" if stops else "length")
        assert "".join(token.text for token in tokens) == final.outputs[0].text


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("is_beam_search", [False, True])
def test_the_token_that_ends_an_output_has_no_text(
    is_beam_search, skip_special_tokens, text_checkpoint
):
    llm = LLM(text_checkpoint, num_blocks=64)
    beams = {"beam_width": 2} if is_beam_search else {"temperature": 0}
    options = beams | {"max_tokens": 10, "skip_special_tokens": skip_special_tokens}
    [plain] = llm.generate(PROMPT, SamplingParams(**options))[0].outputs
    params = SamplingParams(**options, stop_token_ids=plain.token_ids[3:4])
    *tokens, last = llm.stream(PROMPT, params)
    [output] = last.outputs
    assert output.finish_reason == "stop"
    assert output.text == llm.tokenizer.decode(output.token_ids[:-1]) != ""
    assert "".join(token.text for token in tokens) == ("" if is_beam_search else output.text)


def test_nothing_is_shared_across_salts(make_llm):
    """Each tenant finds only its own prompts in the cache."""
    llm = make_llm(block_size=4, num_blocks=64)
    prompts = [PROMPT, SaltedPrompt(PROMPT, "a"), SaltedPrompt(PROMPT, b"a")]
    prompts += [{"prompt_token_ids": PROMPT, "cache_salt": salt} for salt in ("b", None, "a")]
    outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts + prompts[:4]]
    assert [o.stats.num_cached_tokens for o in outputs] == [0] * 4 + [24] * 6
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(PROMPT)}
    for salted in (SaltedPrompt, lambda ids, salt: {"prompt_token_ids": ids, "cache_salt": salt}):
        with pytest.raises(ValueError, match=r"cache_salt=7: needs str \| bytes"):
            llm.generate(salted(PROMPT, 7))


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("w1 w2", ["w1 w2"]),
        ({"prompt": "w1 w2"}, ["w1 w2"]),
        ({"prompt_token_ids": [1, 2], "multi_modal_data": None}, [None]),
        ([{"prompt": "a text", "prompt_token_ids": [1, 2]}, [1, 2]], ["a text", None]),
        ((SaltedPrompt("w1 w2", "a"), {"prompt": "w1 w2", "cache_salt": "a"}), ["w1 w2"] * 2),
    ],
)
def test_prompts_have_the_forms_of_vllm(prompts, texts, text_checkpoint):
    outputs = LLM(text_checkpoint, num_blocks=64).generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == texts
    assert all(output.prompt_token_ids == [1, 2] for output in outputs)
    assert all(output["text"] == output.outputs[0].text for output in outputs)  # of nano-vLLM


@pytest.mark.parametrize(
    ("use_tqdm", "terminal", "shown"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_work_of_more_than_a_second_shows_progress(use_tqdm, terminal, shown, llm, monkeypatch):
    for seconds, is_long in ((itertools.repeat(0), False), (itertools.count(), True)):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr("tqdm.std.time", lambda seconds=seconds: next(seconds))
        llm.generate(PROMPT, GREEDY, use_tqdm)
        llm.generate(PROMPT, SamplingParams(beam_width=2, max_tokens=4), use_tqdm)
        for text in ("1/1", "10 tokens", ", 0 tokens]"):
            assert (text in stream.getvalue()) == (shown and is_long)


def test_blocks_behind_the_window_are_given_back(make_llm, make_checkpoint):
    """A prompt is found in the cache although only its end is still there."""
    _, oracle = make_checkpoint("mistral")  # each layer sees 11 tokens
    prompts = [[(i * i * k + k) % 97 for i in range(100)] for k in (3, 5)]
    params = SamplingParams(temperature=0, max_tokens=60)
    llm = make_llm("mistral", block_size=4, num_blocks=42, max_num_batched_tokens=16)
    for prompt, num_cached in ((prompts[0], 0), (prompts[1], 0), (prompts[1], 96)):
        held, tokens = [], []
        for event in llm.stream(prompt, params):
            if isinstance(event, TokenOutput):
                held.append(llm.manager.num_blocks - llm.manager.num_free_blocks)
                tokens.append(event.token_id)
        assert tokens == oracle_tokens(oracle, prompt, 60)
        assert max(held[1:]) == 4  # of 40: the blocks of 11 tokens, and the next one
        assert event.stats.num_cached_tokens == num_cached
        llm.manager.check_invariants()
    assert llm.manager.stats.evicted_blocks > 0


@pytest.mark.parametrize("checkpoint", ["gemma2", "mistral"])
def test_blocks_behind_a_window_that_may_be_swapped_are_kept(checkpoint, make_llm):
    llm = make_llm(checkpoint, block_size=4, num_blocks=42, preemption="swap")
    stream = llm.stream([list(range(60))], SamplingParams(temperature=0, max_tokens=9))
    held = [42 - llm.manager.num_free_blocks for event in stream if isinstance(event, TokenOutput)]
    assert max(held) == 17


def test_reset_prefix_cache(make_llm):
    llm = make_llm(num_blocks=64)
    llm.generate(PROMPT, GREEDY)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    assert not llm.reset_prefix_cache()  # while a request is served
    stream.close()
    assert llm.reset_prefix_cache()
    assert llm.generate(PROMPT, GREEDY)[0].stats.num_cached_tokens == 0


def test_a_client_speaks_of_a_session_until_it_ends():
    class Listener(POLICIES["lru"]):
        def tell(self, request):
            told.append(request)

        correct = tell

    told, last = [], SamplingParams(session=SessionHint("a", ends=True))
    llm = LLM(tiny_config(), policy=Listener(), block_size=1, num_blocks=6)
    stream = llm.stream([1, 2], SamplingParams(n=2, max_tokens=4, session="a"))
    next(stream)
    llm.hint_session(SessionHint("a", expected_pause_ms=50))
    *_, output = stream
    assert output.stats.num_preemptions > 0
    llm.hint_session(SessionHint("a", expected_pause_ms=7))
    pauses = [request.expected_pause_ms for request in told]
    assert [pause for pause in pauses if not math.isnan(pause)] == [50, 50, 7]
    assert {request.session for request in told} == {SessionHint("a").number}
    llm.stream([1], last).close()  # a cancelled request ends no session
    llm.generate([1], last)
    assert told[-1].ends_session == 1
    with pytest.raises(ValueError, match=r"prompts\[0\]: session='a': has ended"):
        llm.generate([1], last)
    for hint, message in ((last.session, "session='a': has ended"), ("a", "hint='a': needs")):
        with pytest.raises(ValueError, match=message):
            llm.hint_session(hint)
    for number in range(4096):
        llm.hint_session(SessionHint(number, ends=True))
    llm.generate([1], last)  # forgotten


TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
 <{{ message.role }}> {{ message['content'] | trim }} {{ eos_token }}
{%- endfor %}
{%- for tool in tools or [] %} {{ tool.name }}{% endfor %}
{%- if add_generation_prompt %} <assistant> {% endif %}
{%- if enable_thinking is defined and not enable_thinking %} w12{% endif %}
"""
MESSAGES = [{"role": "system", "content": " w1 w2 "}, {"role": "user", "content": "w3"}]


@pytest.fixture
def chat_checkpoint(text_checkpoint):
    tokens = {"bos_token": "w10", "eos_token": {"content": "w11"}, "unk_token": "w0"}
    fields = json.dumps(tokens | {"chat_template": TEMPLATE})
    (text_checkpoint / "tokenizer_config.json").write_text(fields)
    return text_checkpoint


def test_chats(chat_checkpoint):
    llm = LLM(chat_checkpoint, num_blocks=64)
    one, [two, three] = llm.chat(MESSAGES, GREEDY), llm.chat([MESSAGES, MESSAGES[1:]], GREEDY)
    assert one[0].prompt == two.prompt == ("w10 <system> w1 w2 w11 <user> w3 w11 <assistant> ")
    assert one[0].outputs == two.outputs
    assert len(three.prompt_token_ids) < len(two.prompt_token_ids)
    assert two.prompt_token_ids[0] == 10  # w10, once
    assert two.prompt_token_ids[1] != 10
    [continued] = llm.chat(MESSAGES, GREEDY, continue_final_message=True)
    assert continued.prompt == "w10 <system> w1 w2 w11 <user> w3"
    quiet = {"enable_thinking": False}
    for options in (quiet, {"chat_template_kwargs": quiet}):
        assert llm.chat(MESSAGES, GREEDY, **options)[0].prompt == two.prompt + " w12"
    assert llm.chat(MESSAGES[1], GREEDY)[0].outputs == three.outputs
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == two.prompt
    assert tokenizer.encode("w1 w10 w2") == [1, 10, 2]
    assert llm.chat(MESSAGES, GREEDY, enable_thinkin=False)[0].prompt == two.prompt


def test_the_command_line_chats(chat_checkpoint, capsys):
    arguments = ["--model", str(chat_checkpoint), "--chat", "--num-blocks", "9"]
    assert main([*arguments, "--prompt", "w3"]) == 0
    assert " <user> w3 w11 <assistant>" in capsys.readouterr().out


def test_messages_that_the_template_refuses(chat_checkpoint):
    llm = LLM(chat_checkpoint, num_blocks=64)
    for messages, message in (
        ([{"role": "tool", "content": "w1"}], "tokenizer_config.json: no tools"),
        ([["w1"]], "messages: needs mappings, got 'w1'"),
        (7, "messages: needs mappings, got 7"),
        ("w1", "messages: needs mappings, got 'w1'"),
        ([{"role": "user", "content": "\ud800"}], "surrogates not allowed"),
        ([{"role": "user", "content": [{"type": "image"}]}], "parts of type text, got .*image"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.chat(messages, GREEDY)


def test_a_chat_needs_a_template_that_can_be_read(text_checkpoint):
    with pytest.raises(ValueError, match="a chat needs a chat template"):
        LLM(text_checkpoint, num_blocks=64).chat(MESSAGES)
    (text_checkpoint / "chat_template.jinja").write_text("{% if %}")
    llm = LLM(text_checkpoint, num_blocks=64)
    assert llm.generate(PROMPT, GREEDY)
    with pytest.raises(ValueError, match=r"chat_template\.jinja: Expected an expression"):
        llm.chat(MESSAGES)
    llm.tokenizer = Tokenizer(WordLevel({}, unk_token="?"))
    with pytest.raises(ValueError, match=r"prompts\[0\]: prompt: 'w1': WordLevel error"):
        llm.generate("w1")
