"""Prompts put together from texts, and the names of their blocks.

A *text* is a run of tokens like no other: two prompts agree exactly as far as they consist of the
same texts, each taken from its beginning.  Which words a text consists of does not matter to a
cache, so a text is a number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt; immutable, so that continuations share what they have in common."""

    num_tokens: int
    block_ids: list[int]
    """Its full blocks.  Shared with other prompts: not to be changed."""
    tail: tuple[tuple[int, int, int], ...]
    """The tokens after the last full block as ``(text, start, stop)``."""


class PromptSpace:
    """All prompts of a workload; gives every block an id that is unique to its prefix.

    A block is known by its parent block and its own tokens.  Ids count up, parents before children.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.empty = Prompt(0, [], ())
        self._num_texts = 0
        self._num_blocks = 0
        # Full blocks inside one text that follow a parent, by (parent, text, first token).
        self._runs: dict[tuple[int, int, int], list[int]] = {}
        # Blocks of several texts, by parent and tokens.
        self._mixed: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}

    def new_text(self) -> int:
        """A text that no prompt contains yet."""
        self._num_texts += 1
        return self._num_texts - 1

    def extended(self, prompt: Prompt, text: int, num_tokens: int) -> Prompt:
        """``prompt`` followed by the first ``num_tokens`` tokens of ``text``."""
        block_ids, tail = prompt.block_ids, prompt.tail
        start = 0
        if tail and num_tokens:
            in_tail = prompt.num_tokens % self.block_size
            start = min(self.block_size - in_tail, num_tokens)
            tail = (*tail, (text, 0, start))
            if in_tail + start == self.block_size:
                key = (block_ids[-1] if block_ids else -1, tail)
                if key not in self._mixed:
                    self._mixed[key] = self._new_block()
                block_ids = [*block_ids, self._mixed[key]]
                tail = ()
        num_full = (num_tokens - start) // self.block_size
        if num_full:
            run = self._runs.setdefault((block_ids[-1] if block_ids else -1, text, start), [])
            while len(run) < num_full:
                run.append(self._new_block())
            block_ids = block_ids + run[:num_full]
            start += num_full * self.block_size
        if start < num_tokens:
            tail = ((text, start, num_tokens),)
        return Prompt(prompt.num_tokens + num_tokens, block_ids, tail)

    def _new_block(self) -> int:
        self._num_blocks += 1
        return self._num_blocks - 1
