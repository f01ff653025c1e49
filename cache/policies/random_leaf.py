"""Randomised leaf eviction."""

from __future__ import annotations

import random

from cache.policies.leaves import LeafPolicy, Node
from cache.policies.random import Bag


class RandomLeaf(LeafPolicy):
    """Randomised leaf-token eviction (RLT; Wu, Silwal and Zhang, ICLR 2026), block by block.

    The marking algorithm of Fiat et al. (1991) on the tree of prompts.  A used block is marked.
    The victim is sampled uniformly from the unmarked leaves.  When all are marked, all marks are
    removed.  On any traffic it is expected to miss O(log capacity) times as often as the optimum.
    LRU and every deterministic policy can be made to miss capacity times as often.  The publication
    evicts tokens; with blocks a draw takes ``block_size`` of them.
    """

    name = "random_leaf"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def _reset(self) -> None:
        self._generator = random.Random(self.seed)
        self._phase = 0
        self._unmarked = Bag()
        self._marked: dict[Node, None] = {}

    def _access(self, nodes: list[Node]) -> None:
        for node in nodes:
            node.memo = self._phase

    def _offer(self, node: Node) -> None:
        if node.memo == self._phase:
            self._marked[node] = None
        else:
            self._unmarked.add(node)

    def _withdraw(self, node: Node) -> None:
        if node.memo == self._phase:
            del self._marked[node]
        else:
            self._unmarked.remove(node)

    def _take(self) -> Node | None:
        if not self._unmarked:
            self._phase += 1
            for node in self._marked:
                self._unmarked.add(node)
            self._marked.clear()
        if not self._unmarked:
            return None
        return self._unmarked.draw(self._generator)
