"""Pieces, stop strings and the final text agree, at a cost per token that does not grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.serving.output_text import OutputText

TEXT = st.text("ab", max_size=3)
STEPS = st.lists(st.tuples(TEXT, TEXT), max_size=12)
"""What each token settles, and the text after it, which the next token may replace."""


@given(STEPS, st.lists(st.text("ab", min_size=1, max_size=4)), st.integers(0, 5))
def test_an_output_ends_where_its_text_has_a_stop_string(steps, stops, min_tokens):
    text = OutputText(lambda token_ids: steps[token_ids[0]], stops, min_tokens)
    streamed, settled, skipped, final = "", "", 0, ""
    for i, (new, pending) in enumerate(steps):
        settled += new
        final = settled + pending
        ends = [
            begin
            for stop in stops
            for begin in range(len(final))
            if final.startswith(stop, begin) and begin + len(stop) > skipped
        ]
        if i < min_tokens:
            skipped, ends = len(final), []
        assert text.append([i]) == bool(ends)
        if ends:
            final = final[: min(ends)]
            break
        streamed += text.next_piece()
        assert settled.startswith(streamed)
    assert text.finish() == final
    assert streamed + text.next_piece() == final


def test_a_token_costs_the_same_at_any_length():
    lengths = []

    class Text(str):
        def __radd__(self, settled):
            lengths.append(len(settled))
            return str(settled) + str(self)

    text = OutputText(lambda token_ids: ("word ", Text()), ["never"])
    assert not any(text.append([i]) for i in range(1000))
    assert len(lengths) == 1000
    assert max(lengths) <= 9
