"""Pieces, stop strings and the final text agree, at a cost per token that does not grow."""

from hypothesis import given
from hypothesis import strategies as st

from cache.serving.output_text import OutputText

STEPS = st.lists(st.tuples(st.text("ab", max_size=3), st.text("ab\ufffd", max_size=3)), max_size=12)
"""What each token settles, and the text after it, which the next token may replace."""
STOPS = st.lists(st.text("ab", min_size=1, max_size=4) | st.just("\ufffd"))


def before_stop(text: str, stops: list[str], skipped: int) -> str:
    """The text before the first stop string that ends after ``skipped`` characters."""
    ends = ((i, i + len(s)) for s in stops for i in range(len(text)) if text.startswith(s, i))
    return text[: min((i for i, end in ends if end > skipped), default=len(text))]


@given(STEPS, STOPS, st.integers(0, 5))
def test_an_output_ends_where_its_text_has_a_stop_string(steps, stops, min_tokens):
    text = OutputText(lambda token_ids: steps[token_ids[0]], stops, min_tokens)
    streamed, settled, skipped, final = "", "", 0, ""
    for i, (new, pending) in enumerate(steps):
        settled += new
        known, final = settled + pending.rstrip("\ufffd"), settled + pending
        if i < min_tokens:
            skipped = len(known)
        ends = before_stop(known, stops, skipped) != known
        assert text.append([i]) == ends
        if ends:
            final = known
            break
        streamed += text.next_piece()
        assert settled.startswith(streamed)
    if len(steps) >= min_tokens:
        final = before_stop(final, stops, skipped)
    assert text.finish() == final
    assert streamed + text.next_piece() == final


def test_a_token_costs_the_same_at_any_length():
    lengths = []

    class Text(str):
        def __radd__(self, settled):
            lengths.append(len(settled))
            return str(settled) + str(self)

        def rstrip(self, characters):
            return self

    text = OutputText(lambda token_ids: ("word ", Text()), ["never"])
    assert not any(text.append([i]) for i in range(1000))
    assert len(lengths) == 1000
    assert max(lengths) <= 9
