"""Prompts: texts, token ids or messages of a chat."""

import contextlib
import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from cache.blocks.sequence import check_key
from cache.checks import shown
from kernels.testing.hugging_face import import_transformers
from models.config import read_json_object
from models.gguf import is_gguf, open_gguf


@dataclass(frozen=True)
class SaltedPrompt:
    """A prompt that shares K/V only with prompts of the same salt, for example of the same tenant.

    Raises ValueError for a salt that is neither bytes nor text in valid Unicode.
    """

    prompt: str | Sequence[int]
    cache_salt: str | bytes

    def __post_init__(self) -> None:
        check_key("cache_salt", self.cache_salt, str | bytes)


Prompt = str | Sequence[int] | Mapping[str, Any] | SaltedPrompt
_KEYS = "prompt", "prompt_token_ids", "cache_salt"
Messages = Sequence[Mapping[str, object]]
"""Messages of a chat, usually with a "role" and a "content"."""

_MEDIA = re.compile("(input_)?(image|audio|video|file)(_url)?")
"""Types of content parts that need a multi-modal model."""


@contextlib.contextmanager
def tokenizer_errors(source: str | Path) -> Iterator[None]:
    """Turn errors and panics of tokenizers into ValueErrors that begin with ``source``."""
    try:
        yield
    except BaseException as error:
        # A panic is a BaseException whose class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{source}: " + str(error).removeprefix(f"{source}: ")) from None


def load_tokenizer(folder: Path | None) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None without a tokenizer.json.

    Raises ValueError, naming the file, if the tokenizer cannot be read.
    """
    if folder is not None and is_gguf(folder):
        file = open_gguf(folder)
        with tokenizer_errors(folder):
            return file.tokenizer()
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.exists():
        return None
    with tokenizer_errors(path):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # files may hold such settings for training batches
    tokenizer.no_padding()
    return tokenizer


def as_list(values: Any) -> list:
    """The items of an iterable; a text, a mapping or any other value alone."""
    is_one = isinstance(values, str | Mapping) or not isinstance(values, Iterable)
    return [values] if is_one else list(values)


def list_prompts(prompts: Any) -> list[Any]:
    """One or several prompts as a list.  Token ids may be a list, an array or a tensor."""
    is_one = isinstance(prompts, str | bytes | bytearray | range)
    if is_one or not isinstance(prompts, Sequence):
        return list(prompts) if getattr(prompts, "ndim", 0) > 1 else [prompts]
    return [prompts] if prompts and isinstance(prompts[0], Integral) else list(prompts)


def split_prompt(
    prompt: Any, encode: Callable[[str], list[int]]
) -> tuple[str | None, list[int], str | bytes | None]:
    """Text (or None), token ids and cache salt (or None) of a prompt.

    A mapping has vLLM's keys: "prompt" or "prompt_token_ids" (of both the ids count), and perhaps
    "cache_salt".  Raises ValueError for a mapping with other keys, and for what is no prompt."""
    if isinstance(prompt, SaltedPrompt):
        text, token_ids, salt = split_prompt(prompt.prompt, encode)
        if salt is not None:
            raise ValueError(f"prompt: has the cache salts {shown(salt)} and {prompt.cache_salt!r}")
        return text, token_ids, prompt.cache_salt
    if isinstance(prompt, str):
        return prompt, encode(prompt), None
    if not isinstance(prompt, Mapping):
        return None, to_token_ids(prompt), None
    given = {key: value for key, value in prompt.items() if value is not None}
    text, token_ids, salt = (given.pop(key, None) for key in _KEYS)
    if isinstance(text, str | None) and not given:
        if token_ids is not None:
            return text, to_token_ids(token_ids), salt
        if text is not None:
            return text, encode(text), salt
    got = f"key {', '.join(map(shown, given))}" if given else shown(prompt)
    needs = "a text as 'prompt' or a list as 'prompt_token_ids', and perhaps 'cache_salt'"
    raise ValueError(f"prompt: got a mapping with {got}; needs {needs}")


def to_token_ids(prompt: Any) -> list[int]:
    """The token ids of a sequence, an array or a tensor.  Raises ValueError for other types."""
    if isinstance(prompt, bytes | bytearray):
        raise ValueError(f"prompt: got bytes, {shown(prompt)}; decode them to a str")
    if isinstance(prompt, range):
        prompt = prompt[: 2**24 + 1]  # longer than any model's maximum
    try:
        if isinstance(prompt, Sequence) or hasattr(prompt, "ndim"):
            return list(map(operator.index, prompt))
    except Exception:  # a sequence may raise any exception
        pass
    got = f"the {type(prompt).__name__} {shown(prompt)}"
    got += ", which has no order" * isinstance(prompt, set | frozenset)
    raise ValueError(f"prompt: needs a text or a list of token ids, got {got}")


class ChatTemplate:
    """Chat template of a checkpoint.  ``render`` reads and renders it with transformers.

    Args:
        source: a Jinja text, or several by name.  None: read from the folder ``path``
            chat_template.jinja and additional_chat_templates, else tokenizer_config.json.
        path: file or folder of the checkpoint; error messages name it.
        special_tokens: special tokens that the template uses, such as bos_token.  Without a source
            they are read from the folder.
    """

    def __init__(
        self, source: str | Mapping[str, str] | None, path: Path, special_tokens: Mapping[str, str]
    ) -> None:
        self._source, self._path, self._special_tokens = source, path, special_tokens

    def render(
        self, messages: Messages, /, *, add_generation_prompt: bool | None = None, **options: Any
    ) -> str:
        """The text that ``apply_chat_template`` of transformers writes for a chat.

        Args:
            messages: the chat.  No part of a content may be an image, audio, video or file.
            add_generation_prompt: end with the start of the model's answer.  By default True,
                unless ``continue_final_message`` is given.
            options: ``tools``, ``documents``, ``chat_template``, ``continue_final_message`` as in
                transformers, and variables of the template.  Variables that it does not use have no
                effect.

        Raises ValueError for malformed messages and options and for errors of the template.  The
        errors of the template name its file."""
        messages = as_list(messages)
        for message in messages:
            if not isinstance(message, Mapping):
                raise ValueError(f"messages: needs mappings, got {shown(message)}")
            parts = message.get("content")
            for part in parts if isinstance(parts, list | tuple) else ():
                if isinstance(part, Mapping) and _MEDIA.fullmatch(str(part.get("type"))):
                    raise ValueError(f"messages: needs parts of type text, got {shown(part)}")
        if add_generation_prompt is None:
            add_generation_prompt = not options.get("continue_final_message")
        try:
            return self.reader.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except Exception as error:  # a template may raise any exception
            files = ", ".join(map(str, _template_files(self._path) or [self._path]))
            raise ValueError(f"messages: {files}: {error} ({type(error).__name__})") from error

    @functools.cached_property
    def reader(self) -> Any:
        """A tokenizer of transformers without a vocabulary.  It reads and renders the templates."""
        transformers = import_transformers()  # takes seconds
        from transformers import PreTrainedTokenizerBase

        config = self._path / "tokenizer_config.json"
        named = read_json_object(config).get("tokenizer_class") if config.exists() else None
        kind = getattr(transformers, str(named), PreTrainedTokenizerBase)

        class Reader(PreTrainedTokenizerBase):
            added_tokens_decoder: Any = MappingProxyType({})

            def __init__(self, *_: object, **fields: Any) -> None:
                for name in self.SPECIAL_TOKENS_ATTRIBUTES:
                    if name in (of_kind := inspect.signature(kind).parameters):
                        fields.setdefault(name, of_kind[name].default)
                    if isinstance(fields.get(name), Mapping):
                        fields[name] = fields[name]["content"]
                super().__init__(**fields)

        if self._source is None:
            return Reader.from_pretrained(self._path, local_files_only=True)
        return Reader(chat_template=self._source, **self._special_tokens)


def to_transformers(tokenizer: Tokenizer, template: ChatTemplate | None) -> Any:
    """A tokenizer of transformers with the special tokens of ``template``, if there is one."""
    fields = {}
    if template is not None:
        fields = {"chat_template": template.reader.chat_template}
        fields |= template.reader.special_tokens_map
    return import_transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, **fields)


def _template_files(folder: Path) -> list[Path]:
    """The Jinja files with a checkpoint's chat templates; else the JSON file, if it has one."""
    patterns = "chat_template.jinja", "additional_chat_templates/*.jinja"
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    config = folder / "tokenizer_config.json"
    if not files and config.exists() and read_json_object(config).get("chat_template") is not None:
        return [config]
    return files


def load_chat_template(folder: Path | None) -> ChatTemplate | None:
    """The chat template of a checkpoint, or None without a template."""
    if folder is None:
        return None
    if is_gguf(folder):
        sources, tokens = open_gguf(folder).chat_templates()
        return ChatTemplate(sources, folder, tokens) if sources else None
    return ChatTemplate(None, folder, {}) if _template_files(folder) else None
