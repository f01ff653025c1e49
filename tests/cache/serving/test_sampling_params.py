"""Valid and invalid sampling parameters."""

import math

import pytest

from cache.serving.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n=0"),
        ({"n": True}, "n=True"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"min_p": 1.5}, "min_p=1.5: needs a number from 0 to 1"),
        ({"frequency_penalty": 2.1}, "frequency_penalty=2.1: needs a number from -2 to 2"),
        ({"presence_penalty": "1"}, "presence_penalty='1'"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: needs a finite number above 0"),
        ({"min_tokens": 65}, "min_tokens=65: needs an int from 0 to max_tokens=64"),
        ({"stop": ["a", ""]}, "stop=.*: needs a text, or a collection of texts"),
        ({"stop": 7}, "stop=7"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache=1: needs True or False"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias={'5': 1.0}: needs a mapping of token ids to"),
        ({"logit_bias": {5: math.nan}}, "logit_bias={5: nan}"),
        ({"logit_bias": 7}, "logit_bias=7"),
        ({"stop": {"a": 1}}, "stop={'a': 1}: needs a text, or a collection of texts"),
        ({"beam_width": 2, "logit_bias": {1: 1}}, "has no meaning for beam search"),
        ({"stop_token_ids": "ab"}, "stop_token_ids='ab'"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids=\[-1\]"),
        ({"length_penalty": None}, "length_penalty=None"),
        ({"session": 1.5}, "session=1.5: needs a SessionHint, None, or a session's id"),
        ({"beam_width": 2, "n": 3}, "beam_width=2: needs an int of at least n=3"),
        ({"length_penalty": math.inf}, "length_penalty=inf"),
        ({"beam_width": 2, "stop": "x"}, "has no meaning for beam search"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "has no meaning for beam search"),
        ({"beam_width": 2, "seed": 1}, "has no meaning for beam search"),
        ({"beam_width": 2, "temperature": 0.5}, "has no meaning for beam search"),
        ({"beam_width": 2, "top_k": 1}, "has no meaning for beam search"),
        ({"beam_width": 2, "top_p": 0.5}, "has no meaning for beam search"),
    ],
)
def test_invalid_parameters_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


def test_stop_token_ids_are_copied():
    stops = [3, 3, 1]
    params = SamplingParams(stop_token_ids=stops)
    stops.append(9)
    assert params.stop_token_ids == {1, 3}


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 1, "max_tokens": 1, "min_tokens": 1, "top_k": -1, "top_p": 1, "min_p": 1},
        {"temperature": 0, "frequency_penalty": 2, "presence_penalty": -2, "min_p": 0},
        {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 1e-9, "logprobs": 0},
        {"stop": (), "stop_token_ids": [0], "seed": -1, "top_p": 1e-9, "max_tokens": None},
        {"logit_bias": {0: -math.inf}, "min_tokens": 9},
        {"beam_width": 1, "length_penalty": 100, "temperature": 1, "top_k": -1},
        {"beam_width": 3, "n": 3, "length_penalty": -100, "temperature": 0, "top_k": 0},
    ],
)
def test_limits_are_allowed(arguments):
    params = SamplingParams(**arguments)
    assert all(getattr(params, name) == value for name, value in arguments.items() if value != [0])


def test_is_greedy_and_has_penalties():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy
    changes = {"min_tokens": 1, "logit_bias": {1: 1}, "presence_penalty": 1}
    for name, value in changes.items():
        assert not SamplingParams(temperature=0, **{name: value}).is_greedy
    assert not SamplingParams(temperature=0, min_tokens=1).has_penalties
