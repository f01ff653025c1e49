import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from models.prompts import (
    list_prompts,
    load_chat_template,
    load_tokenizer,
    split_prompt,
    to_token_ids,
)


def test_one_prompt():
    ids = [1, 2], (1, 2), np.array([1, 2]), [np.int64(1)], torch.tensor([1, 2])
    for prompt in ("a text", *ids, {"prompt": "a text"}, 7):
        [same] = list_prompts(prompt)
        assert same is prompt


def test_several_prompts():
    for prompts, count in (
        ([], 0), ([[]], 1), (["a", [1, 2], "b"], 3), (("a", {"prompt": "b"}), 2),
        ([np.array([1]), np.array([2])], 2), (np.array([[1, 2], [3, 4]]), 2),
        (torch.tensor([[1, 2], [3, 4], [5, 6]]), 3), ([torch.tensor([1]), torch.tensor([2])], 2),
    ):  # fmt: skip
        assert len(list_prompts(prompts)) == count


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"a"}, "needs a text or a list of token ids, got the set {'a'}, which has no order"),
        ([frozenset([1])], "got the frozenset .*, which has no order"),
        ((text for text in "ab"), "got the generator <generator ob"),
        ({"prompt": "a"}.values(), "got the dict_values "),
        ({}, "prompt: got a mapping with {}; needs a text as 'prompt' or a list as 'prompt_tok"),
        ({"prompt": "a", "multi_modal_data": 7}, "got a mapping with key 'multi_modal_data'; need"),
        ({"text": "a", "b": 1}, "got a mapping with key 'text', 'b'; needs a text as 'prompt'"),
        ([{"prompt": ["a"]}], r"got a mapping with {'prompt': \['a'\]}; needs a text"),
        ([{"prompt_token_ids": "a"}], "needs a text or a list of token ids, got the str 'a'"),
        *((prompt, f"got the {type(prompt).__name__} ") for prompt in (None, 7, [[1.0]], [["a"]])),
        *((prompt, "prompt: needs a text or a li") for prompt in ([[[1], [2]]], np.array([0.5]))),
    ],
)
def test_what_is_no_prompt_is_named(prompts, message):
    with pytest.raises(ValueError, match=message):
        split_prompt(*list_prompts(prompts), list)


def test_token_ids_become_ints():
    for prompt in ([3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4])):
        token_ids = to_token_ids(prompt)
        assert token_ids == [3, 4]
        assert {type(token) for token in token_ids} == {int}


def test_a_tokenizer_neither_truncates_nor_pads(tmp_path):
    """A tokenizer.json may have the settings of its training batches."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(9)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("w1 w2 w3 w4 w5").ids == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "text",
    [
        '{"version": "1.0"',
        '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}',  # a panic
    ],
)
def test_a_damaged_tokenizer_is_named(tmp_path, text):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)


TEMPLATES = {
    "default": "{{ bos_token }}{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text | trim }};{% endfor %}{% endif %}{{ eos_token }}"
    "{{ m.reasoning_content }}{{ m.name is none }}{% endfor %}{{ tools is none }}{{ image_token }}"
    "{{ pad_token }}{% if add_generation_prompt %}<assistant>{% endif %}",
    "tool_use": "{{ tools | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}"
    "{{ messages | tojson(indent=2) }}{{ documents | tojson }}",
    "tracked": "{% macro quoted(m) %}{{ mark | default('-') }}{{ m['content'] }}{% endmacro %}\n"
    "{%- for m in messages if m.content %}\n  {% generation %}{{ quoted(m) }}"
    "{% endgeneration %}\n  {% if loop.last %}{% break %}{% endif %}\n{% endfor %}",
    "call": "{{ messages[0].tool_calls[0].function.name }}",
    "strict": "{{ raise_exception('no') if messages[1:] else 1 // messages[0].content | length }}",
    "open": "{% if %}",
}


def weather(city: str):
    """The weather of today.

    Args:
        city: Its name.
    """


texts = st.none() | st.text("a é\n<", max_size=4)
contents = texts | st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts))
calls = st.just([{"function": {"name": "f", "arguments": {}}}])
fields = {"content": contents, "tool_calls": calls, "reasoning": texts, "name": texts}
options_of_a_chat = {
    "tools": st.none() | st.lists(st.sampled_from([weather, {"é": 1, "a": "é<"}])),
    "documents": st.just([{"title": "é"}]),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.sampled_from([False, True, "reasoning"]),
    "chat_template": st.sampled_from([*TEMPLATES, "{{ messages[0].content }}"]),
    "mark": texts,
    "return_tensors": st.just("pt"),
}


@pytest.mark.parametrize("in_files", [False, True])
def test_chats_are_written_as_transformers_writes_them(in_files, tmp_path, transformers):
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    sources = dict(TEMPLATES)
    config = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": None}
    config["extra_special_tokens"] = {"image_token": "<image>"}
    config["tokenizer_class"] = "GemmaTokenizer"  # has a pad_token
    config["chat_template"] = [{"name": n, "template": text} for n, text in sources.items()]
    if in_files:
        config["chat_template"] = "is not read"
        (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
        (tmp_path / "chat_template.jinja").write_text(sources.pop("default"))
        (tmp_path / "additional_chat_templates").mkdir()
        for name, source in sources.items():
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_chat_template(tmp_path)

    @settings(max_examples=200)
    @given(
        st.lists(st.fixed_dictionaries({"role": st.just("user")}, optional=fields), max_size=3),
        st.fixed_dictionaries({}, optional=options_of_a_chat),
    )
    def check(chat, options):
        prompted = {"add_generation_prompt": not options.get("continue_final_message")} | options
        try:
            expected = theirs.apply_chat_template(chat, tokenize=False, **prompted)
        except Exception:
            with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
                ours.render(chat, **options)
        else:
            assert ours.render(chat, **options) == expected

    check()
    for name in ("tokenize", "conversation", "messages", "self"):  # not of the template
        with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
            ours.render([{"content": "a"}], **{name: True})
