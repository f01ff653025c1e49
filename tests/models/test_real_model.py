"""SmolLM2-135M-Instruct, where `make model` has installed it: its tokens, text and chats."""

import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import save_file

from models import LLM, SamplingParams
from models.gguf import open_gguf
from models.hub import default_model
from models.weights import checkpoint_tensors

try:
    pytest.importorskip("gguf")
    MODEL = default_model()
except (FileNotFoundError, pytest.skip.Exception):
    pytest.skip("the model is not installed: run `make model`", allow_module_level=True)

PROMPTS = [" ".join(text.split()[4:16]) for text in itertools.islice(topics.values(), 20)]


@pytest.fixture(scope="module")
def smollm2():
    return LLM(MODEL, num_blocks=256)


@pytest.fixture(scope="module")
def weights(smollm2):
    """The tensors of the file by their names in a checkpoint."""
    return dict(open_gguf(MODEL).tensors(checkpoint_tensors(smollm2.model)))


def test_the_tokenizer_splits_digits(smollm2):
    assert smollm2.tokenizer.encode("Unsigned\n\n8-bit").ids[2:4] == [1116, 40]


@torch.no_grad()
def test_greedy_tokens_equal_those_of_transformers(smollm2, weights, transformers):
    """Teacher-forced: each of our tokens is the likeliest of transformers after the ones before."""
    config = transformers.LlamaConfig(**open_gguf(MODEL).config())
    with torch.device("meta"):
        oracle = transformers.LlamaForCausalLM(config).eval()
    oracle.load_state_dict(weights, strict=False, assign=True)
    oracle.tie_weights()
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(config)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    for prompt, output in zip(PROMPTS, smollm2.generate(PROMPTS, params), strict=True):
        ours, before = output.outputs[0].token_ids, list(output.prompt_token_ids)
        logits = oracle(torch.tensor([before + ours[:-1]])).logits[0, len(before) - 1 :]
        behind = logits.amax(-1) - logits[range(32), ours]
        assert not behind.any(), f"{prompt!r}: behind by {behind.tolist()}"


def test_streamed_emoji_add_up(smollm2):
    """An emoji is several tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    *tokens, output = smollm2.stream("I love it 😀🚀🎉 I love it 😀🚀🎉 I love it", params)
    assert "".join(token.text for token in tokens) == output.outputs[0].text == " 😀🚀🎉"


EXECUTED = """
    import sys
    from kernels.executor import execute_ptx
    from models import LLM, SamplingParams

    options = {"num_blocks": 4, "max_model_len": 32}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompt = [504, 3575, 282, 649, 314]
    [expected] = LLM(sys.argv[1], attention_backend="torch", **options).generate([prompt], params)
    with execute_ptx("sm_90") as run:
        llm = LLM(sys.argv[1], attention_backend="triton", **options)
        [output] = llm.generate([prompt], params)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids, (output, expected)
    print({launch.kernel for launch in run.launches})
"""


def test_two_layers_executed_as_ptx_give_the_same_tokens(weights, tmp_path):
    """Attention, norms, RoPE, store and sampling as compiled for sm_90; products by PyTorch. The
    checkpoint has two of the 30 layers and 4,096 of the 49,152 tokens."""
    config = open_gguf(MODEL).config() | {"num_hidden_layers": 2, "vocab_size": 4096}
    config["dtype"] = "float32"
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = {
        name: tensor[: 4096 if "embed" in name else None].clone()
        for name, tensor in weights.items()
        if not re.search(r"layers\.([2-9]|\d\d)\.", name)
    }
    save_file(kept, tmp_path / "model.safetensors")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", textwrap.dedent(EXECUTED), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    for kernel in ("decode", "prefill", "norm", "rope", "store", "sample"):
        assert kernel in done.stdout, done.stdout
