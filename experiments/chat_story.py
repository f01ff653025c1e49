"""Chats with a real model: prompt tokens that are computed and time to first token, by turn.

Eight users talk with SmolLM2-135M-Instruct for ten turns, all with the same system prompt.  In each
turn every user sends a passage of Python's documentation, all at the same time; a prompt is the
whole chat so far, written by the chat template, so answers are tokenised again.  Answers are
greedy, and every manager serves the same tokens (``answers`` is their checksum).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cache import MANAGERS
from experiments import quantiles, style
from experiments.harness import Axis, Count, Experiment, Options, grid, one_of
from experiments.load import engine_models
from experiments.load.engine_models import Manager

if TYPE_CHECKING:
    from models import LLM, RequestOutput

_SYSTEM = "You are a patient teacher of Python. Say in one sentence what the passage means. "


@dataclass(frozen=True, kw_only=True)
class ChatStory(Options):
    """The grid: managers x block sizes."""

    manager: Axis[Manager] = ("paged", "nano_vllm", "vllm_v0", "vllm_v1", "radix")
    block_size: Axis[Count] = (16, 128)
    """Managers without prefix caching run with the first one only."""
    model: Annotated[str, one_of(("tiny", engine_models.SMOLLM2))] = engine_models.SMOLLM2
    """tiny has random weights and a byte per token."""
    users: Count = 8
    turns: Count = 10
    system_characters: Count = 600
    message_characters: Count = 150
    answer_tokens: Count = 24
    """Most tokens of an answer."""
    cache_tokens: Count = 12_288
    """Slots of the KV cache."""
    threads: Count = 2


def cells(options: ChatStory) -> Iterator[ChatStory]:
    for cell in grid(options):
        caches = MANAGERS[cell.manager].prefix_caching
        if caches or cell.block_size == options.block_size[0]:
            yield cell


def run_cell(cell: ChatStory) -> list[dict[str, Any]]:
    llm = engine_models.make_llm(
        cell.model,
        **cell.columns("manager", "block_size", "threads"),
        device="cpu",
        num_blocks=-(-cell.cache_tokens // cell.block_size),
    )
    text = engine_models.prose()
    system = _SYSTEM + text[-cell.system_characters :]
    chats = [[{"role": "system", "content": system}] for _ in range(cell.users)]
    _answer(llm, [[{"role": "user", "content": "Hello"}]], 2)  # the first call is slower
    rows = []
    for turn in range(cell.turns):
        for user, chat in enumerate(chats):
            start = (user * cell.turns + turn) * cell.message_characters
            message = text[start : start + cell.message_characters]
            chat.append({"role": "user", "content": message})
        outputs = _answer(llm, chats, cell.answer_tokens)
        for chat, output in zip(chats, outputs, strict=True):
            [completion] = output.outputs
            tokens, answer = completion.token_ids, completion.text
            answer = bytes(t % 256 for t in tokens).decode("latin-1") if answer is None else answer
            chat.append({"role": "assistant", "content": answer})
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        times = [output.stats.time_to_first_token for output in outputs]
        rows.append(
            {
                **cell.columns("model", "threads", "users", "manager", "block_size"),
                "turn": turn + 1,
                "prompt_tokens": prompt,
                "computed_tokens": prompt - sum(o.stats.num_cached_tokens for o in outputs),
                **quantiles.columns("first_token_s", times),
                "answers": zlib.crc32(str([o.outputs[0].token_ids for o in outputs]).encode()),
            }
        )
    return rows


def _answer(llm: LLM, chats: list[list[dict]], max_tokens: int) -> list[RequestOutput]:
    from models import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    if llm.chat_template is not None:
        return llm.chat(chats, params)
    texts = ["\n".join(message["content"] for message in chat) for chat in chats]
    return llm.generate([list(text.encode()) for text in texts], params)


def _summary(rows: style.DataFrame) -> style.DataFrame:
    """A row per manager and block size, over all turns; times are medians of the turns' medians."""
    return rows.groupby(["manager", "block_size"], sort=False, as_index=False).agg(
        prompt_tokens=("prompt_tokens", "sum"),
        computed_tokens=("computed_tokens", "sum"),
        first_token_s=("first_token_s_p50", "median"),
        last_turn_first_token_s=("first_token_s_p50", "last"),
    )


def _draw(rows: style.DataFrame) -> style.Figure:
    """Computed tokens and time to first token, by turn; the marker grows with the block size."""
    figure, (computed, first), _ = style.panel_grid(2, height=1.9, width=2.8)
    managers = style.lines_of(rows["manager"].unique())
    sizes = [*rows["block_size"].unique()]
    for (manager, size), of_cell in rows.groupby(["manager", "block_size"], sort=False):
        look = managers[manager] | {"label": f"{manager}, blocks of {size}"}
        if step := sizes.index(size):
            look |= {"markerfacecolor": "white", "markersize": 3 + 2 * step}
        style.curve(computed, of_cell, "turn", "computed_tokens", 1 / rows["users"].iloc[0], **look)
        style.curve(first, of_cell, "turn", "first_token_s_p50", **look)
    computed.set(ylabel="prompt tokens computed\nper user", yscale="log")
    first.set(ylabel="median time to\nfirst token (s)", yscale="log")
    for axis in (computed, first):
        style.plain_log_ticks(axis.yaxis)
    labels = {"xlabel": f"turn ({rows['model'].iloc[0]}, {rows['users'].iloc[0]} users)"}
    return style.shared_legend(figure, columns=3, **labels)


EXPERIMENT = Experiment(
    name="chat_story",
    figure="chats with a real model: tokens computed and time to first token by turn",
    options=ChatStory(),
    quick=ChatStory(manager=("paged", "vllm_v1"), block_size=(16,), users=2, turns=2),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter({"chat_story": _draw}, {"summary": (_summary, "%.4g")}),
    timed=True,
)
