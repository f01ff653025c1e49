"""Convert published traces of other formats to traces that ``load_trace`` reads.

Run ``python -m cache.traces.convert FORMAT SOURCE OUT``.  OUT ends in ``.jsonl``, ``.jsonl.gz`` or
``.jsonl.zst``.  FORMAT is

- ``bailian``: a JSON-lines file of Alibaba's Qwen-Bailian usage traces (Wang et al., USENIX ATC
  2025).  Times are in seconds.  An id is the hash of 16 tokens without their prefix;
- ``ragpulse``: the folder ``data`` of RAGPulse (arXiv 2511.12979).  A prompt is a list of
  components.  Their lengths are in separate files;
- ``sessions``: a folder of callanjfox/kv-cache-tester's ``trace_*.json``: one session of a coding
  agent per file.  Ids and times are the session's own;
- ``trace``: a file that ``load_trace`` can read (Mooncake, CSV).
"""

import argparse
import itertools
import operator
import os
import reprlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cache.checks import at_least, finite
from cache.traces.files import parse_json, read_lines, split_suffixes
from cache.traces.trace import (
    Trace,
    TraceError,
    collected,
    load_trace,
    placed,
    read_requests,
    save_trace,
)

_BAILIAN_BLOCK = 16
_RAGPULSE_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""Components of a prompt in the order of concatenation."""
_RAGPULSE_LENGTHS = {
    "1_sys_prompt.jsonl": "sys_prompt_id", "2_passages.jsonl": "passage_id",
    "3_history.jsonl": "history_id", "4_user_input.jsonl": "user_input_id",
    "5_web_search.jsonl": "web_search_id",
}  # fmt: skip


class _Numbers(dict[tuple[Hashable, Hashable], int]):
    """Numbers keys from 0."""

    def __missing__(self, key: tuple[Hashable, Hashable]) -> int:
        return self.setdefault(key, len(self))

    def of_prefixes(self, contents: Iterable[Hashable]) -> list[int]:
        """Equal numbers mean equal prompts up to the end of the block with this content."""
        before = None
        return [before := self[before, content] for content in contents]


def convert_bailian(path: str | os.PathLike) -> Trace:
    """Make each id unique to its prefix, and convert seconds to ms.

    Raises TraceError for a line that is not a request, and for a file without requests.
    """
    path, numbers = Path(path), _Numbers()

    def request(line: bytes) -> tuple:
        record = parse_json(line)
        lengths = record["input_length"], record["output_length"]
        contents = record["hash_ids"]
        if not isinstance(contents, list) or set(map(type, contents)) - {int}:
            raise ValueError(f"hash_ids must be a list of integers, got {reprlib.repr(contents)}")
        return _milliseconds(record["timestamp"]), *lengths, numbers.of_prefixes(contents)

    return read_requests(path, request, split_suffixes(path)[0], _BAILIAN_BLOCK)


def convert_ragpulse(folder: str | os.PathLike, *, block_size: int = 16) -> Trace:
    """Join the components of each prompt and cut them into full blocks.

    The order is system prompt, passages, history, web search, user input.  Prompt lengths are sums
    of component lengths; published lengths count some further tokens.  Seconds become ms.

    Raises TraceError for a line that is not a request or a component, a line that names an unknown
    component, and a file without requests.
    """
    folder, numbers, lengths = Path(folder), _Numbers(), {}
    at_least(1, "block_size", block_size)
    for file, field in _RAGPULSE_LENGTHS.items():
        key = operator.itemgetter(field, "token_length")
        for number, line in read_lines(folder / file):
            with placed(partial(TraceError, folder / file), number):
                part, length = key(parse_json(line))
                lengths[part] = at_least(0, "token_length", length, 2**24)

    def request(line: bytes) -> tuple:
        record = parse_json(line)
        parts = [part for name in _RAGPULSE_PARTS for part in record["hash_ids"][name]]
        parts = [(part, lengths[part]) for part in parts]
        tokens = sum(length for _, length in parts)
        blocks = numbers.of_prefixes(_cut(parts, block_size))
        time = record["timestamp"]  # a number in quotes
        time = _milliseconds(float(time) if isinstance(time, str) else time)
        return time, tokens, record["output_length"], blocks

    return read_requests(folder / "0_trace.jsonl", request, "ragpulse", block_size)


def _cut(parts: list[tuple[int, int]], block_size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Cut concatenated parts (id, tokens) into full blocks: tuples of pairs (id, first token)."""
    block: list[tuple[int, int]] = []
    room = block_size
    for part, length in parts:
        start = 0
        while length - start >= room:
            yield (*block, (part, start))
            start, block, room = start + room, [], block_size
        if start < length:
            block.append((part, start))
            room -= length - start


def convert_sessions(folder: str | os.PathLike, *, hours: float = 24.0, seed: int = 0) -> Trace:
    """Merge the sessions of a folder by arrival.

    Sessions were recorded separately.  In the order of file names, each session gets a start time
    sampled uniformly from ``hours`` with ``seed``, so the arrivals are synthetic.  Times of a
    sub-agent's requests are relative to its start.  Ids are unique within a session; ids of scope
    "global" are common to all sessions.  ``Trace.columns`` contain the publisher's further facts.

    Raises TraceError if a file is not a session or its block size differs from the first file's,
    and ValueError if the folder has no requests.
    """
    import numpy as np

    finite("hours", hours)
    paths = sorted(Path(folder).glob("trace_*.json"))
    starts = (3600e3 * hours * np.random.default_rng(seed).random(len(paths))).tolist()
    numbers, requests, block_size = _Numbers(), [], None
    for number, (path, start) in enumerate(zip(paths, starts, strict=True)):
        with placed(partial(TraceError, path), 1):
            session = parse_json(path.read_bytes())
            size = at_least(1, "block_size", session["block_size"])
            block_size = block_size or size
            if size != block_size:
                raise ValueError(f"blocks of {size} tokens, others {block_size}")
            scope = None if session.get("hash_id_scope") == "global" else path.name
            agents = itertools.count()
            for time, tokens, output, blocks, further in _leaves(session, start, agents):
                ids = [numbers[scope, block] for block in blocks]
                further["session"] = number
                requests.append((path, (time, tokens, output, ids, further)))

    error = lambda path, reason: TraceError(path, 1, reason)  # noqa: E731
    trace = collected(requests, tuple, error, Path(folder).name, block_size)
    if not trace:
        raise ValueError(f"folder must hold trace_*.json with requests, got {str(folder)!r}")
    return trace


def _leaves(agent: dict[str, Any], start_ms: float, numbers: Iterator[int]) -> Iterator[tuple]:
    """Yield (ms, prompt, output, ids, further facts) per request of an agent and its sub-agents."""
    facts: dict[str, Any] = {"agent": next(numbers)}
    facts |= {name: agent[name] for name in ("tool_tokens", "system_tokens") if name in agent}
    for entry in agent["requests"]:
        time = start_ms + _milliseconds(entry["t"])
        if entry["type"] == "subagent":
            yield from _leaves(entry, time, numbers)
            continue
        further = facts | {"stop": entry.get("stop") or ""}
        if entry.get("think_time") is not None:
            further["think_time"] = _milliseconds(entry["think_time"])
        yield time, entry["in"], entry["out"], entry["hash_ids"], further


def _milliseconds(seconds: float) -> float:
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise ValueError(f"timestamp must be a number of seconds, got {reprlib.repr(seconds)}")
    return 1000 * seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cache.traces.convert", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    formats = parser.add_subparsers(dest="format", required=True, metavar="FORMAT")
    known: dict[str, Callable[..., Trace]] = {
        "bailian": convert_bailian, "ragpulse": convert_ragpulse,
        "sessions": convert_sessions, "trace": load_trace,
    }  # fmt: skip
    for name, convert in known.items():
        command = formats.add_parser(name, help=str(convert.__doc__).partition("\n")[0])
        command.add_argument("source", type=Path)
        command.add_argument("out", type=Path)
        command.add_argument("--coarsen", type=int, default=1, help="blocks joined into one")
        if name == "ragpulse":
            command.add_argument("--block-size", type=int, default=16, help="tokens")
        if name == "sessions":
            command.add_argument("--hours", type=float, default=24.0, help="range of the starts")
            command.add_argument("--seed", type=int, default=0, help="seed of the starts")
        if name == "trace":
            command.add_argument("--columns", help="of a CSV file: time=ts,input_length=prompt,...")
    options = vars(parser.parse_args(arguments))
    convert, source, out = known[options.pop("format")], options.pop("source"), options.pop("out")
    factor = options.pop("coarsen")
    try:
        trace = convert(source, **options).coarsened(factor)
        save_trace(trace, out)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(f"{out}: {trace!r}, an infinite cache hits {trace.infinite_cache_hit_rate:.4f}")


if __name__ == "__main__":
    main()
