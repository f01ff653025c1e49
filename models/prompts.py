"""Prompts: texts, token ids or messages of a chat."""

from __future__ import annotations

import datetime
import json
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from models.config import read_json_object
from models.gguf import is_gguf, open_gguf


@dataclass(frozen=True)
class SaltedPrompt:
    """A prompt that shares K/V only with prompts of the same salt, for example of one tenant.

    Raises ValueError for a salt that is neither text nor bytes.
    """

    prompt: str | Sequence[int]
    cache_salt: str | bytes

    def __post_init__(self) -> None:
        if not isinstance(self.cache_salt, str | bytes):
            raise ValueError(f"cache_salt={self.cache_salt!r}: needs a str or bytes")


Prompt = str | Sequence[int] | SaltedPrompt
Messages = Sequence[Mapping[str, object]]
"""Messages of a chat, each with a "role" and a "content"."""


def load_tokenizer(folder: Path | None) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None if it has no tokenizer.json.

    Raises ValueError, naming the file, if it cannot be read.
    """
    if folder is not None and is_gguf(folder):
        return open_gguf(folder).tokenizer()
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"{path}: {error}") from None
    tokenizer.no_truncation()  # settings of training batches
    tokenizer.no_padding()
    return tokenizer


def list_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One or several prompts as a list; one may be a list, an array or a tensor of token ids."""
    if isinstance(prompts, str | bytes | bytearray) or not isinstance(prompts, Iterable):
        return [prompts]
    if hasattr(prompts, "ndim"):
        return [prompts] if prompts.ndim < 2 else list(prompts)
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def to_token_ids(prompt: Iterable[int]) -> list[int]:
    """Token ids as a list of int.  Raises ValueError for other types."""
    if isinstance(prompt, bytes | bytearray):
        raise ValueError(f"prompt: got bytes, {reprlib.repr(prompt)}; decode them to a str")
    try:
        return list(map(operator.index, prompt))
    except TypeError:
        raise ValueError(f"prompt: needs a text or token ids, got {reprlib.repr(prompt)}") from None


class ChatTemplate:
    """Jinja template that formats a chat, from chat_template.jinja or tokenizer_config.json.

    Raises ValueError, naming the file, for a malformed template.
    """

    def __init__(self, source: str, path: Path, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._path, self._special_tokens = path, special_tokens
        try:
            self._template = environment.from_string(source)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ValueError(f"{path}: chat template: {error}") from None

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = True, **options: object
    ) -> str:
        """The text of a chat, with ``add_generation_prompt`` up to the start of the model's answer.

        Raises ValueError for malformed messages, for options that the template does not have, and
        for errors of the template.
        """
        unknown = options.keys() - self._variables
        if unknown:
            raise ValueError(
                f"{', '.join(sorted(unknown))}: the chat template has no such option; it reads "
                f"{', '.join(sorted(self._variables))}"
            )
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ValueError(
                    f"messages: needs mappings with role and content, got {reprlib.repr(message)}"
                )
        try:
            return self._template.render(
                messages=list(map(_with_one_text, messages)),
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens | options,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"messages: {self._path}: {error}") from None


def _with_one_text(message: Mapping[str, object]) -> Mapping[str, object]:
    """The message with the parts of its content as one text, a line each."""
    parts = message["content"]
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ValueError(f"messages: needs parts of type text, got {reprlib.repr(part)}")
    return {**message, "content": "\n".join(str(part["text"]) for part in parts)}


def load_chat_template(folder: Path | None) -> ChatTemplate | None:
    """The chat template of a checkpoint; None if it has none."""
    if folder is None:
        return None
    if is_gguf(folder):
        source, tokens = open_gguf(folder).chat_template()
        return None if source is None else ChatTemplate(source, folder, tokens)
    path = folder / "tokenizer_config.json"
    config = read_json_object(path) if path.exists() else {}
    tokens = {
        name: token["content"] if isinstance(token, Mapping) else token
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token := config.get(name))
    }
    source, separate = config.get("chat_template"), folder / "chat_template.jinja"
    if separate.exists():
        path, source = separate, separate.read_text(encoding="utf-8")
    if isinstance(source, list):  # several templates by name
        source = {named["name"]: named["template"] for named in source}.get("default")
    return None if source is None else ChatTemplate(source, path, tokens)


def _to_json(value: object, indent: int | None = None, **options: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
