"""What the tables of managers have in common, and what is checked of them in the same way."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from cache.sequence import Sequence


class Table:
    """What a sequence holds, and the sequence, which itself counts the tokens that are stored."""

    __slots__ = ("seq",)

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq

    @property
    def num_tokens(self) -> int:
        """Tokens whose K/V are stored, or being stored by the running step."""
        return self.seq.num_computed_tokens

    def may_lack(self, num_blocks: int, block_size: int) -> bool:
        """Whether the manager may not know yet that ``num_blocks`` of its full blocks are full.

        That is so of the last one if the caller has counted the tokens that filled it.
        """
        return num_blocks == 0 or (num_blocks == 1 and self.num_tokens % block_size == 0)


AnyTable = TypeVar("AnyTable", bound=Table)


def table_of(tables: Mapping[Hashable, AnyTable], seq: Sequence) -> AnyTable:
    """The table of ``seq``; ValueError if it holds no blocks."""
    table = tables.get(seq.seq_id)
    if table is None:
        raise ValueError(f"sequence {seq.seq_id!r} holds no blocks")
    return table


def check_holds_no_blocks(tables: Mapping[Hashable, AnyTable], seq: Sequence) -> None:
    """Raise ValueError if ``seq`` has a table."""
    if seq.seq_id in tables:
        raise ValueError(f"sequence {seq.seq_id!r} holds blocks already; free it first")


def check_grew(seq: Sequence, num_stored: int) -> None:
    """Raise ValueError unless ``seq`` has more tokens than the ``num_stored`` with a slot."""
    if seq.num_tokens <= num_stored:
        raise ValueError(
            f"append: all {num_stored} tokens of sequence {seq.seq_id!r} have a slot; "
            "append a token to the sequence first"
        )


def check_shares_content(parent: Sequence, child: Sequence, num_tokens: int) -> None:
    """Raise ValueError unless the K/V of the first ``num_tokens`` of both must be the same."""
    same_keys = (child.lora_name, child.cache_salt, child.mm_inputs) == (
        parent.lora_name, parent.cache_salt, parent.mm_inputs
    )  # fmt: skip
    if not same_keys or child.token_ids[:num_tokens] != parent.token_ids[:num_tokens]:
        raise ValueError(
            f"child: the first {num_tokens} tokens, the adapter, the multi-modal inputs and the "
            f"salt of sequence {child.seq_id!r} must be those of {parent.seq_id!r}"
        )
