"""Pages link to files that exist, and name paths that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")] if path.stem != "CHANGELOG"
]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAMED = re.compile(r"`((?:cache|docs|experiments|kernels|models|tests)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page):
    text = page.read_text()
    links = [page.parent / link for link in LINK.findall(text) if "://" not in link]
    paths = links + [ROOT / name for name in NAMED.findall(text)]
    missing = [str(path) for path in paths if not path.exists()]
    assert not missing
