"""The tutorial's pictures match today's managers, and its page shows all of them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from docs import tutorial


def numbers_beside(picture: str, label: str) -> list[int]:
    """Block numbers in the row that begins with ``label``."""
    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    first = texts.index(label) + 1
    last = next(i for i in range(first, len(texts)) if not texts[i].isdecimal())
    return [*map(int, texts[first:last])]


def test_the_committed_pictures_are_what_the_managers_do():
    committed = {path.stem: path.read_text() for path in tutorial.FOLDER.iterdir()}
    assert committed == tutorial.pictures(), "run python -m docs.tutorial"


def test_the_page_shows_every_picture_in_order():
    page = tutorial.FOLDER.with_suffix(".md").read_text()
    shown = re.findall(r"!\[[^]]+\]\(tutorial/([\w-]+)\.svg\)", page)
    assert shown == [*tutorial.pictures()]


def test_the_pictures_show_the_worked_examples():
    pictures, queue = tutorial.pictures(), "free queue, next first"
    assert numbers_beside(pictures["3-hit"], "B, 14 tokens") == [0, 1, 5, 6]
    assert numbers_beside(pictures["4-free"], queue) == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]
    assert numbers_beside(pictures["5-revival"], "C, 29 tokens") == [0, 1, 2, 6, 4, 7, 8, 9]
    assert numbers_beside(pictures["12-promotion"], "H, 8 tokens") == [0, 1]
    assert "block 1 to 2" in pictures["10-copy-on-write"]


def test_the_33rd_token_of_c_follows_its_32nd():
    picture = ElementTree.fromstring(tutorial.pictures()["7-preemption"])
    texts = [element.text for element in picture.iter()]
    assert {"68 69", "70"} <= set(texts)
    assert "20" not in texts
