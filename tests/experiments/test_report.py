"""The page of all results: its text and, where there is one, a browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from experiments import cli, report, style
from experiments.registry import EXPERIMENTS

RESULTS = Path(__file__).parents[2] / "results"
FOLDERS = [folder for name in EXPERIMENTS for folder in (RESULTS / name).glob("*")]
FIGURES = [path for folder in FOLDERS for path in folder.glob("*.png")]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

# The page reports what the browser shows to the page around it, which is as wide as a telephone.
ASK = """<script>addEventListener("load", () => setTimeout(async () => {
  for (const table of document.querySelectorAll("details.table")) table.open = true;
  await new Promise(done => setTimeout(done, 500));
  const seen = {
    images: [...document.images].filter(image => image.naturalWidth > 300).length,
    cells: [...document.querySelectorAll(".table .scroll")].map(
      e => e.querySelectorAll("td").length),
    overflow: document.documentElement.scrollWidth - innerWidth,
    verdicts: [...document.querySelectorAll(".overview td:last-child")].map(
      e => innerWidth - e.getBoundingClientRect().right),
  };
  const paper = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  paper.filter = getComputedStyle(document.querySelector(".paper")).filter;
  seen.colors = COLORS.map(color => {
    paper.fillStyle = color, paper.fillRect(0, 0, 9, 9);
    return [...paper.getImageData(4, 4, 1, 1).data];
  });
  parent.postMessage(JSON.stringify(seen), "*");
}, 1000))</script></body>"""
AROUND = """<body><script>onmessage = ({data}) => { document.body.dataset.shown = data; }</script>
<iframe src="asking.html" style="width: 400px; height: 900px; border: 0"></iframe></body>"""
LOOKS = style.policy_lines([*cache.POLICIES, "own"]).values()
COLORS = ["#ffffff", *{look["color"] for look in LOOKS}]


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
    titles = re.findall(r"<h2>(.*?)</h2>", text, re.DOTALL)
    assert len(set(titles)) == len(titles) > len(FOLDERS)
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
    verdicts = re.findall(r"<td>([^<]*)</td></tr>", text[: text.index("<h2>Contents")])
    assert sum(verdict.startswith("another trace: ") for verdict in verdicts) == 7, "Mooncake's"
    assert sum(verdict.startswith("assumed: ") for verdict in verdicts) == 3, "fig. 19"
    count, within = len(verdicts) - 10, verdicts.count(report.WITHIN)
    headline = f"Of {count} published numbers, ours are {report.WITHIN} of {within}; "
    assert headline in text.replace("\n", " ")


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
    verdict = report.WITHIN if in_checkout else "0.52 times"
    row = rf"vLLM</td><td>96.3\s%</td>\s*<td>{judged}</td><td>50.0\s%</td>\s*<td>{verdict}"
    assert re.search(row, text)


@pytest.mark.parametrize(
    "damaged", [("rows.csv", ""), ("rows.csv", "a\n1\n"), ("environment.json", "{")]
)
def test_damaged_results_are_one_line_with_their_folder(damaged, tmp_path, capsys):
    folder = tmp_path / "sharing" / "cpu"
    shutil.copytree(RESULTS / "sharing" / "cpu", folder)
    (folder / damaged[0]).write_text(damaged[1])
    assert cli.main(["report", "--results", str(tmp_path)]) == 2
    assert f"{folder}: cannot be shown (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("published", "measured", "verdict"),
    [
        ("1.7 to 2.7", [2.0, 2.96], report.WITHIN),
        ("1.7 to 2.7", [2.0, 2.98], report.OVERLAP),
        ("1.7 to 2.7", [1.5], "0.88 times"),
        ("20.4 %", [0.132, 0.093, 0.412], "0.46 to 2.02 times"),
        ("1.67", [3.0, 3.5], "1.80 to 2.10 times"),
        ("1.67", [], ""),
    ],
)
def test_verdicts(published, measured, verdict):
    assert report._verdict(published, pd.Series(measured, dtype=float)) == verdict


@given(
    ends=st.lists(st.integers(1, 999), min_size=1, max_size=2),
    ours=st.lists(st.integers(1, 999), min_size=1, max_size=5),
    unit=st.sampled_from(["", " %"]),
)
def test_a_verdict_is_true_of_each_number(ends, ours, unit):
    published = " to ".join(f"{end}{unit}" for end in ends)
    verdict = report._verdict(published, pd.Series(ours, dtype=float) / (100 if unit else 1))
    low, high, least, most = min(ends), max(ends), min(ours), max(ours)
    overlap = low < high and least < most and {*range(low, high + 1)} & {*range(least, most + 1)}
    if all(9 * low <= 10 * number <= 11 * high for number in ours):
        assert verdict == report.WITHIN
    elif overlap:
        assert verdict == report.OVERLAP
    else:
        printed = [*map(float, re.findall(r"[\d.]+", verdict))]
        ratios = [n / min(max(n, low), high) for n in (least, most)]
        assert [printed[0], printed[-1]] == pytest.approx(ratios, abs=0.0051)


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on the PATH")
def test_a_browser_shows_every_figure_and_verdict_on_a_dark_telephone(page, tmp_path):
    asking = tmp_path / "asking.html"
    ask = ASK.replace("COLORS", json.dumps(COLORS))
    asking.write_text(page.read_text().replace("</body>", ask))
    around = tmp_path / "around.html"
    around.write_text(AROUND)  # a window of its own is at least 500 pixels wide
    options = "--headless --no-sandbox --disable-gpu --blink-settings=preferredColorScheme=0 "
    options += "--dump-dom --enable-logging=stderr --virtual-time-budget=20000"
    shown = subprocess.run(
        [CHROMIUM, *options.split(), f"--user-data-dir={tmp_path / 'profile'}", around.as_uri()],
        capture_output=True, text=True, timeout=900, check=True,
    )  # fmt: skip
    console = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert [line for line in console if "document idle" not in line] == []
    [body] = re.findall(r'<body data-shown="([^"]*)"', shown.stdout)
    seen = json.loads(html.unescape(body))
    assert seen["images"] == len(FIGURES)
    assert min(seen["cells"]) > 0
    assert seen["overflow"] <= 0
    assert min(seen["verdicts"]) >= 0
    (paper, *_), *inks = seen["colors"]
    assert paper < 30, "the paper is dark"
    assert all(max(ink[:3]) > 120 for ink in inks)
