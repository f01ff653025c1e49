"""Draws the pictures of tutorial.md and hybrid.md: worked examples on the real managers.

    python -m docs.tutorial

A picture shows the events of each block since the previous picture, the block tables and the free
queue.  It also lists the hashes by which blocks are found.
"""

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cache

FOLDER = Path(__file__).parent
_BLOCK_SIZE = 4
_DIGEST_SIZE = 16
_WIDTH = 780
_STYLE = """
rect { fill: none; stroke: #9aa4af } text { font: 12px monospace; fill: #1b1f24 }
.page { fill: #ffffff; stroke: none } .used { fill: #d3e6f7 } .kept { fill: #fbeebf }
.soft { fill: #59636e } .number { font-weight: bold }
.middle { text-anchor: middle } .end { text-anchor: end }
.allocated { fill: #00704f } .hit { fill: #0b62a8 } .evicted { fill: #b84300 }
@media (prefers-color-scheme: dark) {
text { fill: #e3e6ea } .page { fill: #161a1f } .used { fill: #1d405f } .kept { fill: #4d431a }
.soft { fill: #9aa4af }
.allocated { fill: #4cc9a0 } .hit { fill: #6cb6ff } .evicted { fill: #ff9b66 } }"""


class Story:
    """A manager, its sequences, and the events since the last picture."""

    def __init__(self, manager: str, num_blocks: int, **options: Any) -> None:
        options |= {"num_blocks": num_blocks, "block_size": _BLOCK_SIZE}
        self.manager = cache.make_manager(manager, **options)
        self._blocks = getattr(self.manager, "pool" if manager == "vllm_v1" else "gpu")
        self._happened: dict[int, dict[str, None]] = defaultdict(dict)  # kinds by block
        self._running: dict[Hashable, cache.Sequence] = {}
        self._meanings: dict[bytes, str] = {}
        self._tokens: dict[int, list[int]] = {}
        self._copies: list[tuple[int, int]] = []

    def start(self, name: str, tokens: Iterable[int], end: int | None = None) -> cache.Sequence:
        """Make a new sequence and allocate slots for its tokens before ``end``.  None: for all."""
        seq = cache.Sequence(name, tokens)
        self.resume(seq, end)
        return seq

    def decode(self, seq: cache.Sequence, *tokens: int) -> None:
        """Run one decoding step for each of ``tokens``.  Raises OutOfBlocks."""
        for token in tokens:
            seq.append_token(token)
            self.append(seq)

    def append(self, seq: cache.Sequence) -> None:
        """Allocate slots for all tokens of ``seq`` that have none.  Raises OutOfBlocks."""
        with self._watched():
            self._copies += self.manager.append(seq)

    def fork(self, seq: cache.Sequence, name: str) -> cache.Sequence:
        child = self._running[name] = seq.fork(name)
        self.manager.fork(seq, child)
        return child

    def free(self, seq: cache.Sequence) -> None:
        with self._watched():
            self.manager.free(self._running.pop(seq.seq_id))

    def resume(self, seq: cache.Sequence, end: int | None = None) -> None:
        with self._watched():
            self.manager.admit(seq, self.manager.find(seq), end or seq.num_tokens)
        self._running[seq.seq_id] = seq

    def _contents(self) -> list[bytes | None]:
        """Return the hash of each block.  None for a block that cannot be found."""
        keys = getattr(self._blocks, "block_hashes", None) or self._blocks.keys
        return [key if isinstance(key, bytes) else None for key in keys]

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Record the changes that a call in the ``with`` statement makes to blocks."""
        self._note_tokens()
        users, contents = list(self._blocks.ref_counts), self._contents()
        try:
            yield
        finally:
            changed = zip(users, self._blocks.ref_counts, contents, self._contents(), strict=True)
            for block, (before, after, old, new) in enumerate(changed):
                kinds = {
                    "evicted": old is not None and new != old,
                    "hit": after > before and old is not None and new == old,
                    "allocated": after > before and (old is None or new != old),
                    "cached": new is not None and new != old,
                    "freed": before > 0 and not after,
                }
                self._happened[block] |= {kind: None for kind, is_so in kinds.items() if is_so}

    def picture(self) -> str:
        """Return an SVG of the present state and of the events since the last picture."""
        self.manager.check_invariants()
        self._note_tokens()
        shapes, y = [*self._pool()], 20 - -self.manager.num_blocks // 10 * 144
        self._happened.clear()
        for name, seq in self._running.items():
            tables = self.manager.block_tables(seq)
            for group, table in zip(self.manager.groups, tables, strict=True):
                kind = f", {group.kind}" if len(self.manager.groups) > 1 else ""
                shapes += _row(y, f"{name}, {seq.num_tokens} tokens{kind}", table)
                y += 30
        shapes += _row(y, "free queue, next first", self._blocks.free_blocks())
        y += 40
        if self._copies:
            pairs = ", ".join(f"{source} to {target}" for source, target in self._copies)
            shapes += [_text(0, y, f"copied before the step: block {pairs}", "hit")]
            self._copies, y = [], y + 24
        entries = [(block, digest) for block, digest in enumerate(self._contents()) if digest]
        for i, (block, digest) in enumerate(entries):
            entry = f"{_short(digest)} = {self._meanings[digest]} in block {block}"
            shapes.append(_text(i % 2 * _WIDTH / 2, y + i // 2 * 18, entry))
        height = y + (len(entries) + 1) // 2 * 18
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -4 {_WIDTH + 16} {height}" '
            f'width="{_WIDTH + 16}" height="{height}">\n<style>{_STYLE}\n</style>\n'
            f'<rect class="page" x="-8" y="-4" width="100%" height="100%"/>\n'
            + "\n".join(shapes)
            + "\n</svg>\n"
        )

    def _note_tokens(self) -> None:
        """Record the tokens of each block, and the parent and tokens of each hash."""
        for seq in self._running.values():
            tokens = seq.token_ids.tolist()[: seq.num_computed_tokens]
            for table in self.manager.block_tables(seq):
                for i, block in enumerate(table):
                    self._tokens[block] = tokens[i * _BLOCK_SIZE : (i + 1) * _BLOCK_SIZE]
            for chain in seq.hash_chains.values():
                for i, digest in enumerate(chain):
                    parent = _short(chain[i - 1][:_DIGEST_SIZE]) if i else "start"
                    own = tokens[i * _BLOCK_SIZE : (i + 1) * _BLOCK_SIZE]
                    if len(own) == _BLOCK_SIZE:
                        self._meanings[digest] = f"H({parent}, {' '.join(map(str, own))})"

    def _pool(self) -> Iterator[str]:
        states = zip(self._blocks.ref_counts, self._contents(), strict=True)
        for block, (users, digest) in enumerate(states):
            x, y = block % 10 * _WIDTH / 10, block // 10 * 144
            for i, kind in enumerate(self._happened[block]):
                yield _text(x + 35, y + 12 + 13 * i, kind, f"middle {kind}")
            state = "used" if users else "kept" if digest else "free"
            yield f'<rect class="{state}" x="{x:g}" y="{y + 48}" width="70" height="84" rx="4"/>'
            yield _text(x + 5, y + 63, str(block), "number")
            if users > 1:
                yield _text(x + 66, y + 63, f"{users} users", "end soft")
            tokens = self._tokens[block] if users or digest else []
            for i in range(0, len(tokens), 2):
                text = " ".join(map(str, tokens[i : i + 2]))
                yield _text(x + 35, y + 84 + 8 * i, text, "middle")
            if digest:
                yield _text(x + 35, y + 124, _short(digest), "middle soft")


def _row(y: float, label: str, blocks: Iterable[int]) -> Iterator[str]:
    yield _text(0, y, label)
    blocks = list(blocks)
    if not blocks:
        yield _text(190, y, "empty", "soft")
    for i, block in enumerate(blocks):
        yield f'<rect x="{190 + 36 * i}" y="{y - 16}" width="32" height="22" rx="3"/>'
        yield _text(206 + 36 * i, y, str(block), "middle number")


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{text}</text>'


def _short(key: bytes) -> str:
    """The first digits of the hash, and the number of a further group of layers."""
    group = int.from_bytes(key[_DIGEST_SIZE:])
    return key.hex()[:4] + (f"+{group}" if group else "")


def _prefix_caching() -> Iterator[tuple[str, str]]:
    story = Story("vllm_v1", num_blocks=10)
    a = story.start("A", range(14))
    yield "1-allocation", story.picture()
    story.decode(a, 14, 15, 16)
    yield "2-hashes", story.picture()
    b = story.start("B", [*range(11), 91, 92, 93])
    yield "3-hit", story.picture()
    story.free(a)
    story.free(b)
    yield "4-free", story.picture()
    c = story.start("C", [*range(12), *range(50, 67)])
    yield "5-revival", story.picture()
    d = story.start("D", range(80, 85))
    yield "6-eviction", story.picture()
    try:
        story.decode(c, 67, 68, 69, 70)
    except cache.OutOfBlocks:  # like the scheduler, preempt the youngest sequence
        story.free(d)
        story.append(c)
    yield "7-preemption", story.picture()
    story.free(c)
    story.resume(d)
    yield "8-resumed", story.picture()


def _copy_on_write() -> Iterator[tuple[str, str]]:
    story = Story("vllm_v1", num_blocks=6)
    one = story.start("E", range(6))
    other = story.fork(one, "F")
    yield "9-fork", story.picture()
    story.decode(other, 77)
    story.decode(one, 78)
    yield "10-copy-on-write", story.picture()


def _promotion() -> Iterator[tuple[str, str]]:
    story = Story("vllm_v0", num_blocks=6)
    g = story.start("G", range(6))
    story.decode(g, 6, 7, 8)
    h = story.start("H", range(6))
    story.decode(h, 6)
    yield "11-duplicate", story.picture()
    story.decode(h, 7)
    yield "12-promotion", story.picture()


def _groups() -> Iterator[tuple[str, str]]:
    groups = cache.Group(), cache.Group("window", 6)
    story = Story("vllm_v1", num_blocks=10, groups=groups)
    story.append(story.start("A", range(18), end=12))
    yield "1-window", story.picture()
    story = Story("vllm_v1", num_blocks=16, groups=groups, retention=0)
    story.free(story.start("A", range(17)))
    yield "2-retention", story.picture()
    story.free(story.start("B", [*range(8), *range(50, 59)]))
    yield "3-junction", story.picture()
    story.start("C", [*range(8), 91, 92, 93])
    yield "4-hit", story.picture()


PAGES = {"tutorial": (_prefix_caching, _copy_on_write, _promotion), "hybrid": (_groups,)}


def pictures(page: str) -> dict[str, str]:
    """Return the pictures of ``page``: name -> SVG."""
    return dict(picture for story in PAGES[page] for picture in story())


def main() -> None:
    for page in PAGES:
        for name, picture in pictures(page).items():
            (FOLDER / page / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
