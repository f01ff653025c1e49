"""Sequences of tokens, with the data that cache managers need."""

import copy
from array import array
from collections.abc import Hashable, Iterable
from types import UnionType
from typing import NamedTuple, Self, TypeVar

from cache.checks import as_int, shown

Key = TypeVar("Key", bound=str | bytes | int | None)
ExtraKey = tuple[str | bytes | int, ...]
"""The kind of the key, then its parts: ``("lora", "adapter-7")``."""


class MultiModalInput(NamedTuple):
    """An input (image, sound ...) whose embeddings replace a run of placeholder tokens."""

    content_hash: str | bytes
    """Identifies the content."""
    offset: int
    """Position of the first placeholder in the sequence, in tokens."""
    length: int
    """Number of placeholder tokens."""


class Sequence:
    """The tokens of a request or of one of its samples, and all other data that K/V depend on.

    Args:
        seq_id: id of the sequence in a manager; unique among sequences that hold blocks.
        token_ids: the prompt: at least one token id, each in [0, 2**32).
        lora_name: name or number of the LoRA adapter; None for the base model.
        mm_inputs: multi-modal inputs of the prompt, sorted by offset, not overlapping.
        cache_salt: only sequences with equal salts share blocks; None and empty mean no salt.

    Attributes:
        token_ids: ``array('I')`` of all tokens; NumPy and PyTorch read it without a copy.
            ``append_token`` extends the array.  Only unknown tokens are ever replaced.
        num_unknown_tokens: number of placeholders at the end of ``token_ids``.  The host does not
            have the values of these tokens yet, so they are not hashed.
        num_prompt_tokens: number of tokens the sequence was made with.
        num_cached_tokens: number of leading tokens whose K/V were found at allocation.
        num_computed_tokens: number of leading tokens that have a slot.  They are computed, or the
            scheduled step computes them.
        table_version: number that rises whenever the block table may have changed.
        hints: fields of the policies' ``RequestInfo`` from ``calls_tool`` on, as far as known.  The
            policy gets the session in every call, the other fields when the sequence has finished.
        keyed_length: position in tokens; no block that begins there or later has extra keys.
        hash_chains: (algorithm, block size, group of layers) -> keys of the full blocks.
            BlockHasher adds them.

    Only the manager writes ``num_cached_tokens``, ``num_computed_tokens`` and ``table_version``.
    Raises ValueError, with the argument's name, for bad values.
    """

    def __init__(
        self,
        seq_id: Hashable,
        token_ids: Iterable[int],
        *,
        lora_name: str | int | None = None,
        mm_inputs: Iterable[MultiModalInput | tuple[str | bytes, int, int]] = (),
        cache_salt: str | bytes | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.token_ids: array = pack_token_ids(token_ids)
        if not self.token_ids:
            raise ValueError("token_ids is empty: a sequence has at least one token")
        self.num_prompt_tokens = len(self.token_ids)
        self.num_unknown_tokens = 0
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.table_version = 0
        self.hints: tuple[float, ...] = ()
        self.lora_name = check_key("lora_name", lora_name, str | int | None)
        self.cache_salt = check_key("cache_salt", cache_salt, str | bytes | None) or None
        self.mm_inputs = _check_mm_inputs(mm_inputs, self.num_prompt_tokens)
        self.keyed_length = 0 if lora_name is None and self.cache_salt is None else 1
        if self.mm_inputs:
            self.keyed_length = self.mm_inputs[-1].offset + self.mm_inputs[-1].length
        self.hash_chains: dict[tuple[str, int, int], list[bytes]] = {}

    @property
    def num_tokens(self) -> int:
        """Number of prompt and generated tokens."""
        return len(self.token_ids)

    def append_token(self, token_id: int) -> None:
        """Add a generated token.  Raises ValueError unless it is an int in [0, 2**32)."""
        try:
            self.token_ids.append(token_id)
        except (OverflowError, TypeError):
            _check_token_id(token_id, "token_id")
            raise

    def fork(self, seq_id: Hashable) -> Self:
        """Return a copy with the id ``seq_id`` and its own tokens and hash chains.

        Attributes of a subclass are copied shallowly.  Blocks are not shared until the caller calls
        ``manager.fork(parent, child)``.
        """
        child = copy.copy(self)
        child.seq_id = seq_id
        child.token_ids = self.token_ids[:]
        child.hash_chains = {name: chain[:] for name, chain in self.hash_chains.items()}
        child.num_cached_tokens = child.num_computed_tokens = 0
        return child

    def extra_keys(self, start: int, end: int) -> list[ExtraKey]:
        """Return the extra hash keys of the block with the tokens [``start``, ``end``).

        The first block has the adapter and the salt as keys.  Every block has a key for each
        multi-modal input that overlaps it: the content hash, the offset from the start of the block
        (negative if the input begins before the block) and the length.
        """
        keys: list[ExtraKey] = []
        if start == 0 and self.lora_name is not None:
            keys.append(("lora", self.lora_name))
        if start == 0 and self.cache_salt is not None:
            keys.append(("salt", self.cache_salt))
        for content_hash, offset, length in self.mm_inputs:
            if offset >= end:
                break
            if offset + length > start:
                keys.append(("mm", content_hash, offset - start, length))
        return keys

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(seq_id={self.seq_id!r}, num_tokens={self.num_tokens}, "
            f"num_prompt_tokens={self.num_prompt_tokens})"
        )


def pack_token_ids(token_ids: Iterable[int]) -> array:
    """Copy token ids into an ``array`` of unsigned 32-bit integers.

    Raises ValueError, with the position, for an id that is not an int in [0, 2**32).
    """
    if not isinstance(token_ids, list | tuple | array):
        token_ids = list(token_ids)
    try:
        return array("I", token_ids)
    except (OverflowError, TypeError):
        for position, token_id in enumerate(token_ids):
            _check_token_id(token_id, f"token_ids[{position}]")
        raise


def _check_token_id(token_id: int, name: str) -> None:
    try:
        array("I", (token_id,))
    except (OverflowError, TypeError):
        raise ValueError(f"{name}={shown(token_id)}: a token id is an int in [0, 2**32)") from None


def encode_key(part: str | bytes | int) -> bytes:
    """Encode a part of an extra key.  Different values or types give different bytes.

    Raises ValueError for a text that is not valid Unicode and for an int that is too long.
    """
    if isinstance(part, str):
        kind, payload = b"s", part.encode()
    elif isinstance(part, bytes):
        kind, payload = b"b", part
    else:
        kind, payload = b"i", b"%d" % part
    return b"%b%d:%b" % (kind, len(payload), payload)


def check_key(name: str, value: Key, types: type | UnionType) -> Key:
    """Return ``value``, which is a part of an extra key or None.

    Raises ValueError, with the argument's name, if the type is not in ``types`` or the value cannot
    be hashed.
    """
    if not isinstance(value, types):
        raise ValueError(f"{name}={shown(value)}: needs {types}, got {type(value).__name__}")
    try:
        if value is not None:
            encode_key(value)
    except ValueError as error:
        raise ValueError(f"{name}={shown(value)}: cannot be hashed: {error}") from None
    return value


def _check_mm_inputs(mm_inputs: object, num_prompt_tokens: int) -> tuple[MultiModalInput, ...]:
    if not isinstance(mm_inputs, list | tuple):
        given = shown(mm_inputs)
        raise ValueError(f"mm_inputs={given}: needs a list of (content_hash, offset, length)")
    checked, end = [], 0
    for i, mm_input in enumerate(mm_inputs):
        if not isinstance(mm_input, tuple | list) or len(mm_input) != 3:
            given = shown(mm_input)
            raise ValueError(f"mm_inputs[{i}]={given}: needs (content_hash, offset, length)")
        content_hash = check_key(f"mm_inputs[{i}]: content_hash", mm_input[0], str | bytes)
        offset = as_int(f"mm_inputs[{i}]: offset", mm_input[1])
        length = as_int(f"mm_inputs[{i}]: length", mm_input[2])
        if length < 1 or offset < end or offset + length > num_prompt_tokens:
            raise ValueError(
                f"mm_inputs[{i}]: offset={offset}, length={length}; placeholders begin at "
                f"{end} or later here, have a length of 1 or more, and end within the "
                f"{num_prompt_tokens} tokens of the prompt"
            )
        end = offset + length
        checked.append(MultiModalInput(content_hash, offset, length))
    return tuple(checked)
