"""The page of all results: its text and, where there is one, a browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from experiments import cli, report
from experiments.registry import EXPERIMENTS

pytestmark = pytest.mark.slow
RESULTS = Path(__file__).parents[2] / "results"
FOLDERS = [folder for name in EXPERIMENTS for folder in (RESULTS / name).glob("*")]
FIGURES = [path for folder in FOLDERS for path in folder.glob("*.png")]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

# The page reports what the browser shows.
ASK = """<script>addEventListener("load", () => setTimeout(async () => {
  for (const table of document.querySelectorAll("details.table")) table.open = true;
  await new Promise(done => setTimeout(done, 500));
  const seen = {
    images: [...document.images].filter(image => image.naturalWidth > 300).length,
    cells: [...document.querySelectorAll(".table .scroll")].map(
      e => e.querySelectorAll("td").length),
    overflow: document.documentElement.scrollWidth - innerWidth,
  };
  document.body.dataset.shown = JSON.stringify(seen);
}, 1000))</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert cli.main(["report", "--results", str(RESULTS), "--output", str(path)]) == 0
    return path


def test_the_page_has_every_figure_and_table_and_asks_no_network(page):
    assert page.stat().st_size < 5e6
    text = page.read_text()
    images = re.findall(r'<img src="data:image/webp;base64,[^>]*alt="([^":]*)', text)
    assert sorted(images) == sorted(path.stem for path in FIGURES)
    captions = re.findall(r"<figcaption[^>]*>([^<]*)</figcaption>", text)
    assert len(captions) == len(FIGURES)
    assert all(caption.strip().endswith(".") for caption in captions), captions
    sources = re.findall(r"""\b(?:src|srcset)=|<link|url\(|@import|href=["'][^#"']""", text)
    assert len(sources) == len(FIGURES), "an image has its data"
    tables = [
        json.loads(table)
        for table in re.findall(r'<script type="application/json">([^<]*)</script>', text)
    ]
    csvs = (path for folder in FOLDERS for path in folder.glob("*.csv"))
    lengths = [len(path.read_text().splitlines()) - 1 for path in csvs]
    assert sorted(len(rows) for _, rows in tables) == sorted(lengths)
    assert all(len(row) == len(head) for head, rows in tables for row in rows)


def test_every_experiment_stands_with_its_question_machine_and_commit(page):
    text = page.read_text()
    sections = dict(re.findall(r'<section id="([\w-]+)">(.*?)</section>', text, re.DOTALL))
    for folder in FOLDERS:
        section = sections.pop(f"{folder.parent.name}-{folder.name}")
        environment = json.loads((folder / "environment.json").read_text())
        assert environment["commit"][:12] in section
        assert environment["cpu"]["model"] in section
        assert environment["command"] in section
        assert "How it was measured" in section
    missing = [name for name in EXPERIMENTS if not (RESULTS / name).exists()]
    assert all(f"<code>{name}</code>: " in sections["absent"] for name in missing)


def test_every_published_number_has_one_of_ours_beside_it(page):
    text = page.read_text()
    toml = Path(report.__file__).with_name("published.toml").read_text()
    assert text.count("Published: PagedAttention") == toml.count('source = "PagedAttention') > 5
    assert "not in this grid" not in text
    assert "your run" not in text, "the committed results are no run of the reader's"
    # Fig. 2: what is reserved up to the maximum is mostly empty, what is paged mostly full.
    row = r"Orca \(Max\)</td><td>20.4\s%</td>\s*<td>\d?\d.\d\s% to [1-4]\d.\d\s%</td>"
    assert len(re.findall(row, text)) == 2, "in the overview and in the section"
    paged = r"tokens: vLLM</td><td>96.3\s%</td>\s*<td>9\d.\d\s% to 9\d.\d\s%</td>\s*<td>agrees</td>"
    assert re.search(paged, text)


@pytest.mark.parametrize("in_checkout", [True, False])
def test_a_run_of_ones_own_stands_beside_the_committed_one(in_checkout, tmp_path, monkeypatch):
    if not in_checkout:
        monkeypatch.setattr(report, "committed", lambda name: tmp_path / "none" / name / "cpu")
    folder = tmp_path / "memory_waste" / "cpu"
    shutil.copytree(RESULTS / "memory_waste" / "cpu", folder)
    rows = pd.read_csv(folder / "rows.csv")
    rows.assign(used_fraction=0.5).to_csv(folder / "rows.csv", index=False)
    assert cli.main(["report", "--results", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    judged = r"9\d.\d\s% to 9\d.\d\s%" if in_checkout else r"50.0\s%"
    verdict = "agrees" if in_checkout else "0.52 times"
    row = rf"vLLM</td><td>96.3\s%</td>\s*<td>{judged}</td><td>50.0\s%</td>\s*<td>{verdict}"
    assert re.search(row, text)


@pytest.mark.parametrize(
    ("published", "measured", "verdict"),
    [
        ("1.7 to 2.7", [2.0], "agrees"),
        ("96.3 %", [0.97, 0.99], "agrees"),
        ("40 %", [0.2], "0.5 times"),
        ("1.67", [3.0, 3.5], "1.8 times"),
        ("1.67", [], ""),
    ],
)
def test_verdicts(published, measured, verdict):
    assert report._verdict(published, pd.Series(measured, dtype=float)) == verdict


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on the PATH")
def test_a_browser_shows_every_figure_and_finds_no_fault(page, tmp_path):
    """In a window as narrow as a telephone's, where a page that is too wide shows first."""
    asking = tmp_path / "asking.html"
    asking.write_text(page.read_text().replace("</body>", ASK))
    options = "--headless --no-sandbox --disable-gpu --window-size=390,900 --dump-dom "
    options += "--enable-logging=stderr --virtual-time-budget=20000"
    shown = subprocess.run(
        [CHROMIUM, *options.split(), f"--user-data-dir={tmp_path / 'profile'}", asking.as_uri()],
        capture_output=True, text=True, timeout=900, check=True,
    )  # fmt: skip
    console = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert [line for line in console if "document idle" not in line] == []
    [body] = re.findall(r'<body data-shown="([^"]*)"', shown.stdout)
    seen = json.loads(html.unescape(body))
    assert seen["images"] == len(FIGURES)
    assert min(seen["cells"]) > 0
    assert seen["overflow"] <= 0
