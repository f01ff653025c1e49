import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.attention import TorchBackend
from models.config import ModelConfig
from models.decoder import build_model
from models.parallel import TensorParallel
from models.weights import (
    WeightsError,
    checkpoint_tensors,
    load_kv_scales,
    load_weights,
    randomize_weights,
)

NAMES = ["llama", "llama_biased", "qwen2", "qwen3", "gemma2"]


def empty_model(folder, tp: TensorParallel | None = None, dtype=torch.float32):
    config, device = ModelConfig.from_folder(folder), torch.device("cpu")
    return build_model(config, TorchBackend(), dtype=dtype, device=device, tp=tp)


@pytest.fixture
def folder(make_checkpoint, tmp_path):
    """A copy of a single-file checkpoint that a test may damage."""
    return shutil.copytree(make_checkpoint("qwen3")[0], tmp_path / "checkpoint")


@pytest.fixture
def sharded(make_checkpoint, tmp_path):
    source, _ = make_checkpoint("qwen3", max_shard_size="40KB")
    folder = shutil.copytree(source, tmp_path / "sharded")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def assert_same_weights(one, other) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def rewrite(folder, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_shards_hold_the_same_weights(sharded, make_checkpoint):
    one, many = empty_model(sharded), empty_model(sharded)
    load_weights(one, make_checkpoint("qwen3")[0])
    load_weights(many, sharded)
    assert_same_weights(one, many)


def test_weights_are_cast_to_the_dtype_of_the_model(folder):
    model = empty_model(folder, dtype=torch.bfloat16)
    load_weights(model, folder)
    expected = load_file(folder / "model.safetensors")["model.norm.weight"].bfloat16()
    assert torch.equal(model.model.norm.weight, expected)


@pytest.mark.parametrize(
    ("checkpoint", "size"),
    [*((name, 1) for name in NAMES),
     ("llama", 2), ("llama", 4), ("llama_biased", 4), ("llama_biased", 8), ("qwen3", 4)],
)  # fmt: skip
def test_the_parts_of_all_ranks_make_up_the_checkpoint(checkpoint, size, make_checkpoint):
    folder, _ = make_checkpoint(checkpoint)
    stored = load_file(folder / "model.safetensors")
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in stored.items()}
    local_elements = 0
    for rank in range(size):
        model = empty_model(folder, TensorParallel(rank, size))
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        load_weights(model, folder)
        padded = size > 1  # rows of the vocabulary that no token uses
        assert padded or not any(parameter.isnan().any() for parameter in model.parameters())
        local_elements = sum(parameter.numel() for parameter in model.parameters())
        for name, tensor in checkpoint_tensors(model).items():
            assert torch.equal(tensor.target, stored[name][tensor.index]), name
            covered[name][tensor.index] += 1
    assert all((count > 0).all() for count in covered.values())
    wide = covered["model.layers.0.mlp.down_proj.weight"]
    assert (wide == 1).all()
    assert local_elements < sum(tensor.numel() for tensor in stored.values()) / size * 1.5


def test_each_rank_reads_its_part_of_fused_matrices(folder):
    plain, fused = (empty_model(folder, TensorParallel(1, 2)) for _ in range(2))
    load_weights(plain, folder)

    def fuse(tensors):
        fused_names = ("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))
        for layer in ("model.layers.0", "model.layers.1"):
            for whole, names in fused_names:
                parts = [f"{layer}.{whole.split('.')[0]}.{name}_proj.weight" for name in names]
                tensors[f"{layer}.{whole}.weight"] = torch.cat([tensors.pop(p) for p in parts])

    rewrite(folder, fuse)
    load_weights(fused, folder)
    assert_same_weights(plain, fused)
    name = "model.layers.1.mlp.gate_up_proj.weight"
    rewrite(folder, lambda tensors: tensors[name].resize_(9, 64))
    message = r"gate_up_proj.weight has shape \(9, 64\), .* \(160, 64\)"
    with pytest.raises(WeightsError, match=message):
        load_weights(fused, folder)


def test_tied_embeddings_may_have_either_name_and_old_buffers_are_ignored(folder):
    expected = empty_model(folder)
    load_weights(expected, folder)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    for change in (
        lambda tensors: tensors.update(buffer | {head: tensors[embedding].clone()}),
        lambda tensors: tensors.pop(embedding),
    ):
        rewrite(folder, change)
        model = empty_model(folder)
        load_weights(model, folder)
        assert torch.equal(model.model.embed_tokens.weight, expected.model.embed_tokens.weight)


SCALES = [
    ("0.self_attn.k_scale", torch.ones(2), "k_scale needs one positive number"),
    ("0.self_attn.k_scale", torch.tensor(-1.0), "k_scale needs one positive"),
    ("0.self_attn.v_scale", torch.tensor(torch.inf), "v_scale needs one positive"),
    ("7.self_attn.v_scale", torch.tensor(1.0), "is of no layer of the model"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old: old.pop("model.layers.1.self_attn.k_norm.weight"),
         r"missing tensors: model\.layers\.1\.self_attn\.k_norm\.weight"),
        (lambda old: old.update({"model.layers.0.mlp.experts": torch.ones(1)}),
         r"does not have: model\.layers\.0\.mlp\.experts"),
        (lambda old: old.update({"model.norm.weight": torch.ones(63)}),
         r"model\.norm\.weight has shape \(63,\), the model needs \(64,\)"),
        (lambda old: old.update({"model.norm.weight": torch.ones(64).to(torch.int8)}),
         r"model\.norm\.weight has dtype I8: quantised"),
        (lambda old: old.update({"lm_head.weight": torch.ones(97, 64)}),
         r"model\.embed_tokens\.weight differs from lm_head\.weight, to which config\.json ties"),
        (lambda old: old.pop("model.embed_tokens.weight"),
         r"missing tensors: lm_head\.weight, model\.embed_tokens\.weight"),
        (lambda old: [old.pop(name) for name in sorted(old)[-5:]],
         r"missing tensors: (\S+, ){4}\S+$"),
        (lambda old: [old.pop(name) for name in sorted(old) if "layers.1" in name],
         r"missing tensors: (\S+, ){4}\S+ and 6 more"),
        *((lambda old, new={f"model.layers.{name}": scale}: old.update(new), message)
          for name, scale, message in SCALES),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    rewrite(folder, change)
    model = empty_model(folder)
    with pytest.raises(WeightsError, match=message):
        load_kv_scales(model, folder), load_weights(model, folder)


def cut_short(folder) -> None:
    path = sorted(folder.glob("model*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])


def convert_to_bin(folder) -> None:
    for path in folder.glob("model*"):
        path.rename(folder / "pytorch_model.bin")


def repeat_the_norm(folder) -> None:
    shard = json.loads((folder / INDEX).read_text())["weight_map"]["model.norm.weight"]
    other = next(path for path in sorted(folder.glob("model-*")) if path.name != shard)
    save_file(load_file(other) | {"model.norm.weight": torch.ones(64)}, other)


INDEX = "model.safetensors.index.json"
DAMAGED = [
    (cut_short, r"model-00001-of-\d+\.safetensors: "),
    (convert_to_bin, r"no weights: .*pytorch_model\.bin: convert it"),
    (lambda folder: next(folder.glob("model-00001*")).unlink(), "not in the folder: model-00001"),
    (repeat_the_norm, r"model\.norm\.weight is in another shard"),
    *((lambda folder, text=text: (folder / INDEX).write_text(text), "not an index of shards")
      for text in ("{", "{}", '{"weight_map": []}')),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_absent_and_damaged_files_are_named(damage, message, sharded):
    damage(sharded)
    with pytest.raises(WeightsError, match=message):
        load_weights(empty_model(sharded), sharded)


def test_random_weights_depend_on_the_seed_alone(make_checkpoint):
    folder, _ = make_checkpoint("llama_biased")
    first, again, other = (empty_model(folder) for _ in range(3))
    randomize_weights(first, seed=1)
    randomize_weights(again, seed=1)
    randomize_weights(other, seed=2)
    assert_same_weights(first, again)
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    layers = first.model.layers
    assert not torch.equal(layers[0].mlp.down_proj.weight, layers[1].mlp.down_proj.weight)
    assert abs(first.model.embed_tokens.weight.std() - 0.02) < 0.001
    assert (layers[0].input_layernorm.weight == 1).all()
    assert (layers[0].self_attn.qkv_proj.bias == 0).all()


def test_random_weights_of_ranks_are_parts_of_the_same_matrices(make_checkpoint):
    folder, _ = make_checkpoint("qwen3")
    whole = empty_model(folder)
    randomize_weights(whole, seed=3)
    expected = checkpoint_tensors(whole)
    for rank in range(2):
        part = empty_model(folder, TensorParallel(rank, 2))
        randomize_weights(part, seed=3)
        for name, tensor in checkpoint_tensors(part).items():
            assert torch.equal(tensor.target, expected[name].target[tensor.index]), name
