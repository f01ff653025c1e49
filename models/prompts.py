"""Prompts, as texts or as token ids."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path

from tokenizers import Tokenizer

Prompt = str | Sequence[int]


def load_tokenizer(folder: Path | None) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None if it has no tokenizer.json.

    Raises ValueError, naming the file, if it cannot be read.
    """
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"{path}: {error}") from None
    tokenizer.no_truncation()  # both were for the batches of a training
    tokenizer.no_padding()
    return tokenizer


def list_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One or several prompts as a list; one may be a list, an array or a tensor of token ids."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [prompts]
    if hasattr(prompts, "ndim"):
        return [prompts] if prompts.ndim < 2 else list(prompts)
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def to_token_ids(prompt: Iterable[int]) -> list[int]:
    """Token ids as a list of int.  Raises ValueError for anything else."""
    try:
        return list(map(operator.index, prompt))
    except TypeError:
        raise ValueError(f"prompt: needs a text or token ids, got {reprlib.repr(prompt)}") from None
