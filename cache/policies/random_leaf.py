"""Randomised leaf eviction."""

import math
import random
from collections.abc import Sequence

from cache.policies.leaves import LeafPolicy
from cache.policies.random import Bag


class RandomLeaf(LeafPolicy):
    """Randomised leaf-token eviction (RLT; Wu, Silwal and Zhang, ICLR 2026), block by block.

    This is the marking algorithm of Fiat et al. (1991) on the tree of prompts.  Each use marks a
    block.  The victim is sampled uniformly from the unmarked leaves.  When all leaves are marked,
    all marks are removed.  On any traffic the expected misses are O(log capacity) times the misses
    of the optimum.  For LRU and every other deterministic policy there is traffic with capacity
    times the optimum's misses.  The publication evicts single tokens; here a draw evicts a block.
    """

    name = "random_leaf"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def _reset(self) -> None:
        self._generator = random.Random(self.seed)
        self._phase = 0
        self._unmarked = Bag()  # unmarked leaves; ``_leaves`` has the marked ones

    def _access(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._nodes[block].value = self._phase

    def _offer(self, block: int) -> None:
        if self._nodes[block].value == self._phase:
            self._leaves.push(block, 0.0)
        else:
            self._unmarked.add(block)

    def _withdraw(self, block: int) -> None:
        if self._nodes[block].value == self._phase:
            self._leaves.remove(block)
        else:
            self._unmarked.remove(block)

    def _take(self) -> int:
        if not len(self._unmarked):
            self._phase += 1
            while self._leaves.least() < math.inf:
                self._unmarked.add(self._first_leaf())
        return self._draw()

    def _draw(self) -> int:
        return self._unmarked.draw(self._generator) if self._unmarked else -1
