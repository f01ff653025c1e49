"""The tutorial's pictures match today's managers, and its page shows all of them."""

import re
from xml.etree import ElementTree

from docs import tutorial


def test_the_committed_pictures_are_what_the_managers_do():
    committed = {path.stem: path.read_text() for path in tutorial.FOLDER.iterdir()}
    assert committed == tutorial.pictures(), "run python -m docs.tutorial"


def test_the_page_shows_every_picture_in_order():
    page = tutorial.FOLDER.with_suffix(".md").read_text()
    shown = re.findall(r"!\[[^]]+\]\(tutorial/([\w-]+)\.svg\)", page)
    assert shown == [*tutorial.pictures()]


def test_the_33rd_token_of_c_follows_its_32nd():
    picture = ElementTree.fromstring(tutorial.pictures()["7-preemption"])
    texts = [element.text for element in picture.iter()]
    assert {"68 69", "70"} <= set(texts)
    assert "20" not in texts
