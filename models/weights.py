"""Fills a decoder with weights from safetensors, one shard at a time, or with random weights."""

import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models.gguf import is_gguf, open_gguf
from models.layers import CheckpointTensor

_INDEX = "model.safetensors.index.json"
_KV_SCALE = re.compile(r"(.*\.self_attn)\.(?:attn\.|k_proj\.(?=k)|v_proj\.(?=v))?([kv]_scale)")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = ("F64", "F32", "F16", "BF16")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices that some checkpoints (Phi-3) fuse, and their parts in order."""
_DERIVED = ("rotary_emb.inv_freq",)  # old checkpoints store this buffer; here it is computed


class WeightsError(ValueError):
    """Weights of a checkpoint are absent, damaged or mismatched."""


def checkpoint_tensors(model: nn.Module) -> dict[str, CheckpointTensor]:
    """Destination in ``model`` of each tensor of a checkpoint, by the tensor's name."""
    return {
        name: tensor
        for prefix, module in model.named_modules()
        if hasattr(module, "checkpoint_tensors")
        for name, tensor in module.checkpoint_tensors(prefix)
    }


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill ``model`` from the safetensors in ``folder``, or from a GGUF; each rank reads its part.

    Only one shard is open at a time, and only one tensor is in memory beside the model.  Tied
    embeddings may be stored under one name or both.  ``load_kv_scales`` reads the scales of an fp8
    KV cache.

    Raises WeightsError, naming the file and the tensors, if there are no weights, a shard is absent
    or damaged, a tensor is missing, unexpected, quantised or of another shape, or tied embeddings
    differ.  The model is then unusable."""
    expected = checkpoint_tensors(model)
    tied_to = {}  # for each name of a tensor with two names: the other name
    if _HEAD not in expected:
        expected[_HEAD] = expected[_EMBEDDING]
        tied_to = {_HEAD: _EMBEDDING, _EMBEDDING: _HEAD}
    filled: set[str] = set()
    unexpected = []
    for path in _weight_files(Path(folder)):
        for name, part in _read(path, expected):
            if part is None:
                if not (name.endswith(_DERIVED) or _KV_SCALE.fullmatch(name)):
                    unexpected.append(name)
                continue
            if name in filled:
                raise WeightsError(f"{path}: tensor {name} is in another shard as well")
            filled.add(name)
            target = expected[name].target
            if tied_to.get(name) not in filled:
                target.copy_(part)
            elif not torch.equal(part.to(target.device, target.dtype), target):
                raise WeightsError(
                    f"{path}: {name} differs from {tied_to[name]}, to which config.json ties it; "
                    "set tie_word_embeddings to false there to have both"
                )
    missing = [name for name in expected.keys() - filled if tied_to.get(name) not in filled]
    if missing:
        raise WeightsError(f"{folder}: missing tensors: {_some(sorted(missing))}")
    if unexpected:
        raise WeightsError(
            f"{folder}: tensors that this architecture does not have: {_some(sorted(unexpected))}"
        )


def load_kv_scales(model: nn.Module, folder: str | Path) -> None:
    """Set the attention layers' scales of an fp8 KV cache, where the checkpoint has such scales.

    Scales are tensors of one element with the names that vLLM reads: k_scale and v_scale below
    <layer>.self_attn or self_attn.attn, or k_scale below k_proj and v_scale below v_proj.

    Raises WeightsError for a scale that is not a positive finite number or belongs to no layer.
    """
    for path in _weight_files(Path(folder)):
        if is_gguf(path):
            return  # has none
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (not a dict)
                match = _KV_SCALE.fullmatch(name)
                if match is None:
                    continue
                scale = shard.get_tensor(name)
                if scale.numel() != 1 or not 0 < scale.item() < math.inf:
                    raise WeightsError(f"{path}: {name} needs one positive number, is {scale}")
                try:
                    layer = model.get_submodule(match[1])
                except AttributeError:
                    raise WeightsError(f"{path}: {name} is of no layer of the model") from None
                setattr(layer, match[2], scale.item())


def randomize_weights(model: nn.Module, *, seed: int = 0, std: float = 0.02) -> None:
    """Fill ``model`` with normally distributed weights (norms 1, biases 0).

    A tensor depends only on the seed and its name, so the weights do not depend on the number of
    ranks.
    """
    for name, tensor in checkpoint_tensors(model).items():
        if tensor.init == "normal":
            # Hash the seed and the name to 32 bits: a CPU generator uses no more bits of a seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            whole = torch.empty(tensor.shape, dtype=torch.float32)
            whole.normal_(0.0, std, generator=generator)
            tensor.target.copy_(whole[tensor.index])
        else:
            tensor.target.fill_(1.0 if tensor.init == "ones" else 0.0)


def _weight_files(folder: Path) -> list[Path]:
    if is_gguf(folder):
        return [folder]
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index}: not an index of shards: {error!r}") from None
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise WeightsError(f"{index}: shards that are not in the folder: {_some(absent)}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = f" (there is {_some(others)}: convert it to safetensors)" if others else ""
        raise WeightsError(f"{folder}: no weights: expected *.safetensors{hint}")
    return files


def _read(path: Path, expected: dict[str, CheckpointTensor]) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the name and this rank's part of every tensor in a file.  Fused tensors are divided
    into their parts.  For an unexpected tensor yield its name and None."""
    if is_gguf(path):
        yield from open_gguf(path).tensors(expected)
        return
    try:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (not a dict)
                parts = _parts(name)
                if not expected.keys() >= set(parts):
                    yield name, None
                    continue
                stored = shard.get_slice(name)
                shape, rows = tuple(stored.get_shape()), [expected[p].shape[0] for p in parts]
                needed = (sum(rows), *expected[parts[0]].shape[1:])
                if shape != needed:
                    raise WeightsError(
                        f"{path}: tensor {name} has shape {shape}, the model needs {needed}"
                    )
                if stored.get_dtype() not in _DTYPES:
                    raise WeightsError(
                        f"{path}: tensor {name} has dtype {stored.get_dtype()}: quantised "
                        f"checkpoints are not supported, only {', '.join(_DTYPES)}"
                    )
                ends = itertools.accumulate(rows)
                for part, size, end in zip(parts, rows, ends, strict=True):
                    first, *others = expected[part].index
                    of_rank = range(end - size, end)[first]
                    yield part, stored[(slice(of_rank.start, of_rank.stop), *others)]
    except SafetensorError as error:
        raise WeightsError(f"{path}: {error}") from None


def _parts(name: str) -> list[str]:
    """Names of the parts of a tensor if the checkpoint fuses it, else the tensor's own name."""
    parent, _, kind = name.rpartition(".")
    prefix, _, module = parent.rpartition(".")
    parts = _FUSED.get(module)
    return [name] if parts is None else [f"{prefix}.{part}.{kind}" for part in parts]


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
