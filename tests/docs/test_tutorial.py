"""The pages' pictures match today's managers, and the pages show all of them."""

import re
from xml.etree import ElementTree

import pytest

from docs import tutorial


@pytest.mark.parametrize("page", tutorial.PAGES)
def test_the_committed_pictures_are_what_the_managers_do_and_the_page_shows_all_in_order(page):
    pictures = tutorial.pictures(page)
    committed = {path.stem: path.read_text() for path in (tutorial.FOLDER / page).iterdir()}
    assert committed == pictures, "run python -m docs.tutorial"
    text = (tutorial.FOLDER / f"{page}.md").read_text()
    assert re.findall(rf"!\[[^]]+\]\({page}/([\w-]+)\.svg\)", text) == [*pictures]


def test_the_33rd_token_of_c_follows_its_32nd():
    picture = ElementTree.fromstring(tutorial.pictures("tutorial")["7-preemption"])
    texts = [element.text for element in picture.iter()]
    assert {"68 69", "70"} <= set(texts)
    assert "20" not in texts
