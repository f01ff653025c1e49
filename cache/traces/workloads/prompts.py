"""Prompts made of texts, and the ids of their blocks.

A *text* is a unique sequence of tokens.  Two prompts share a prefix exactly as far as they consist
of the same texts, each from its first token.  The words of a text do not matter to a cache, so a
text is a number.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """An immutable prompt, so that longer prompts can share its blocks."""

    num_tokens: int
    block_ids: list[int]
    """Ids of its full blocks.  Do not change the list: other prompts share it."""
    tail: tuple[int, ...]
    """The tokens after the last full block: ``text, start, stop`` for each text, concatenated."""


class PromptSpace:
    """Makes all prompts of a workload.  The id of a block is unique to its prefix.

    Parent block and tokens identify a block.  The id of a parent is smaller than its children's.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.empty = Prompt(0, [], ())
        self._num_texts = 0
        self._ids: dict[tuple[int, ...], int] = {}  # keys: parent block, tokens

    def new_text(self) -> int:
        """Return a text that no prompt contains yet."""
        self._num_texts += 1
        return self._num_texts - 1

    def extended(self, prompt: Prompt, num_tokens: int, text: int | None = None) -> Prompt:
        """``prompt`` followed by the first ``num_tokens`` tokens of ``text`` (None: a new text)."""
        text = self.new_text() if text is None else text
        block_ids, tail = prompt.block_ids.copy(), prompt.tail
        parent = block_ids[-1] if block_ids else -1
        start, stop = 0, self.block_size - prompt.num_tokens % self.block_size
        while stop <= num_tokens:
            key = (parent, *tail, text, start, stop)
            parent = self._ids.setdefault(key, len(self._ids))
            block_ids.append(parent)
            tail = ()
            start, stop = stop, stop + self.block_size
        if start < num_tokens:
            tail += (text, start, num_tokens)
        return Prompt(prompt.num_tokens + num_tokens, block_ids, tail)
