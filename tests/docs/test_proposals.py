"""The page of proposals is made of the committed tables."""

from docs import proposals


def test_the_page_is_what_the_results_give():
    assert proposals.page() == proposals.PAGE.read_text()
