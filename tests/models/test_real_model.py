"""SmolLM2-135M-Instruct and Gemma 3 270M, each where `make model` has installed it."""

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

from models import LLM, ModelConfig, SamplingParams
from models.attention import TorchBackend
from models.decoder import build_model
from models.gguf import open_gguf
from models.hub import default_model, gemma3_model
from models.weights import checkpoint_tensors

pytest.importorskip("gguf", reason="`make model` installs it")
PROMPTS = [" ".join(text.split()[4:16]) for text in itertools.islice(topics.values(), 20)]
LONG = " ".join(topics["assignment"].split()[:500])  # longer than Gemma's window of 512 tokens
MODELS = {
    "smollm2": (default_model, PROMPTS, 32, [3706, 44625, 1116, 40, 29, 3333]),
    "gemma3": (gemma3_model, [*PROMPTS[:4], LONG], 8, [2, 2805, 53458, 108, 236828, 236772, 3896]),
}
"""How to find a model; its prompts, new tokens per prompt, and tokens of "Unsigned\\n\\n8-bit"."""


def find(name):
    """The path of a model."""
    try:
        return MODELS[name][0]()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_tokens_equal_those_of_transformers(name, transformers, pytestconfig):
    """Teacher-forced: each of our tokens is the likeliest of transformers after the ones before."""
    llm = LLM(path := find(name), num_blocks=256)
    _, prompts, count, token_ids = MODELS[name]
    if not pytestconfig.getoption("--all"):
        prompts, count = prompts[-3:], 8
    assert llm.tokenizer.encode("Unsigned\n\n8-bit").ids == token_ids
    fields = open_gguf(path).config()
    family = getattr(transformers, fields["architectures"][0])
    weights = dict(open_gguf(path).tensors(checkpoint_tensors(llm.model)))
    options = {"state_dict": weights, "config": family.config_class(**fields)}
    oracle = family.from_pretrained(None, dtype=torch.float32, **options).eval()
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        ours, before = output.outputs[0].token_ids, list(output.prompt_token_ids)
        logits = oracle(torch.tensor([before + ours[:-1]]), logits_to_keep=count).logits[0]
        behind = logits.amax(-1) - logits[range(count), ours]
        assert not behind.any(), f"{prompt!r}: behind by {behind.tolist()}"


def test_streamed_emoji_add_up():
    """An emoji is several tokens."""
    llm = LLM(find("smollm2"), num_blocks=256)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    *tokens, output = llm.stream("I love it 😀🚀🎉 I love it 😀🚀🎉 I love it", params)
    assert "".join(token.text for token in tokens) == output.outputs[0].text == " 😀🚀🎉"


EXECUTED = """
    import gc, sys
    from kernels.executor import execute_ptx
    from models import LLM, SamplingParams

    gc.disable()  # kernels as Python objects live to the end
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


def test_two_layers_executed_as_ptx_give_the_same_tokens(tmp_path):
    """Attention, norms, RoPE, store and sampling as compiled for sm_90; products by PyTorch. The
    checkpoint has two of the 30 layers and 4,096 of the 49,152 tokens."""
    path, options = find("smollm2"), {"dtype": torch.float32, "device": torch.device("meta")}
    model = build_model(ModelConfig.from_folder(path), TorchBackend(), **options)
    wanted = checkpoint_tensors(model).items()
    wanted = {k: v for k, v in wanted if not re.search(r"layers\.([2-9]|\d\d)\.", k)}
    config = open_gguf(path).config() | {"num_hidden_layers": 2, "vocab_size": 4096}
    config["dtype"] = "float32"
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = {
        name: tensor[: 4096 if "embed" in name else None].clone()
        for name, tensor in open_gguf(path).tensors(wanted)
        if tensor is not None
    }
    save_file(kept, tmp_path / "model.safetensors")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", textwrap.dedent(EXECUTED), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    for kernel in ("decode", "prefill", "norm", "rope", "store", "sample"):
        assert kernel in done.stdout, done.stdout
