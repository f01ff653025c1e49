"""Stop strings are found as in the whole text, at a cost per token that does not grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.serving.stop_strings import StopSearch, cut_at_stop

PIECES = st.lists(st.text("ab", max_size=3), max_size=12)


@given(PIECES, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), st.integers(0, 5))
def test_a_search_ends_where_the_whole_text_has_a_stop(pieces, stops, min_tokens):
    search = StopSearch(stops, min_tokens, pieces.__getitem__)
    skipped = "".join(pieces[:min_tokens])
    for i in range(len(pieces)):
        text = "".join(pieces[: i + 1])
        found = any(
            text[k : k + len(stop)] == stop and k + len(stop) > len(skipped)
            for stop in stops
            for k in range(len(text))
        )
        assert search.meets_stop(i) == (found and i >= min_tokens)
        assert (cut_at_stop(text, stops, len(skipped)) != text) == found
        if found and i >= min_tokens:
            return


def test_a_token_costs_the_same_at_any_length():
    lengths = []

    class Text(str):
        def find(self, *arguments):
            lengths.append(len(self))
            return super().find(*arguments)

        def __radd__(self, tail):
            return Text(str(tail) + str(self))

    search = StopSearch(["never"], 0, lambda token_id: Text("word "))
    assert not any(search.meets_stop(i) for i in range(1000))
    assert len(lengths) == 1000
    assert max(lengths) <= 9
