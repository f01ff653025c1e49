"""One page that shows all results beside published numbers: ``pagelab report``.

``page.html`` is the template, ``captions.toml`` has the figures' captions, and ``published.toml``
has the published numbers.  The page is self-contained and needs no network.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.harness import Experiment, OptionsError
from experiments.harness.environment import committed
from experiments.harness.store import write_atomically

if TYPE_CHECKING:
    import pandas as pd

_FOLDER = Path(__file__).parent
WITHIN, OVERLAP = "within 10\u00a0%", "ranges overlap"


def write_report(results: Path, output: Path, experiments: Mapping[str, Experiment]) -> Path:
    """Write a page to ``output``: the results of ``experiments`` in the folder ``results``.

    Raises OptionsError if there are no results or if they are damaged, and OSError.
    """
    import jinja2

    published, captions = (
        tomllib.loads((_FOLDER / name).read_text("utf-8").replace(" %", "\u00a0%"))
        for name in ("published.toml", "captions.toml")
    )
    pages = []
    for name, experiment in experiments.items():
        for number, table in enumerate(sorted((results / name).glob("*/rows.csv"))):
            try:
                notes = [] if number else _compare(published.get(name, []), table.parent, name)
                pages.append(_page(experiment, table.parent, notes, captions.get(name, {})))
            except (KeyError, NameError, ValueError) as error:
                what = f"cannot be shown ({type(error).__name__}: {error})"
                again = "run the experiment again if a file was edited or is of another version"
                raise OptionsError(f"{table.parent}: {what}; {again}") from error
    counted = (n for page in pages for n in page["published"] if not n.get("uncounted"))
    if not pages:
        raise OptionsError(f"no rows.csv in a folder of {results}: run an experiment first")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True
    )
    page = environment.get_template("page.html").render(
        pages=pages,
        absent=[e for name, e in experiments.items() if name not in {p["name"] for p in pages}],
        is_committed=results.resolve() == committed("").parent,
        within=WITHIN,
        overlap=OVERLAP,
        rule=(inspect.getdoc(_verdict) or "").partition("\n\n")[2].replace(" %", "\u00a0%"),
        verdicts=[v["verdict"] for n in counted for v in n["values"] if v["verdict"]],
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    return output


def _page(
    experiment: Experiment, folder: Path, published: list[dict[str, Any]], captions: dict[str, str]
) -> dict[str, Any]:
    """The template's values for the results in ``folder``."""
    # An experiment's docstring describes its question and its method.
    text = inspect.getdoc(inspect.getmodule(type(experiment.options))) or experiment.figure
    question, _, method = text.partition("\n\n")
    summaries = sorted({*folder.glob("*.csv")} - {folder / "rows.csv"})
    return {
        "name": experiment.name,
        "figure": experiment.figure,
        "question": _markdown(question.rstrip("."))[3:-5],  # without <p>, </p> and a line's end
        "method": _markdown(method),
        "device": folder.name,
        "id": f"{experiment.name}-{folder.name}",
        "environment": json.loads((folder / "environment.json").read_text("utf-8")),
        "figures": [_picture(path, captions) for path in sorted(folder.glob("*.png"))],
        "published": published,
        "tables": [_table(path) for path in (*summaries, folder / "rows.csv")],
    }


def _markdown(text: str) -> str:
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    text = re.sub(r":\w+:(?=`)", "", text)
    return Markup(MarkdownIt("commonmark", {"html": False}).render(text))


def _picture(path: Path, captions: dict[str, str]) -> dict[str, Any]:
    from PIL import Image

    content = io.BytesIO()
    with Image.open(path) as image:
        width, height = image.size
        few = image.convert("RGB").quantize(128, Image.Quantize.FASTOCTREE)
        few.save(content, "WEBP", lossless=True)
    data = base64.b64encode(content.getvalue()).decode()
    texts = {"name": path.stem, "caption": captions.get(path.stem, path.stem)}
    return {**texts, "width": width, "height": height, "data": data}


def _table(path: Path) -> dict[str, Any]:
    """Name of the table, its varying columns with rows as texts, and values of constant columns."""
    import pandas as pd

    texts = pd.read_csv(path, dtype=str, keep_default_na=False).map(_shorten)
    same = [name for name in texts if len(texts) > 1 and texts[name].nunique() == 1]
    varying = texts.drop(columns=same)
    return {
        "name": path.name,
        "head": [*varying],
        "rows": varying.to_numpy().tolist(),
        "same": {name: texts[name][0] for name in same if texts[name][0]},
    }


def _shorten(text: str) -> str:
    """Return ``text``.  A number is rounded to five digits."""
    if not re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", text) or text.isdigit():
        return text
    return f"{float(text):.5g}"


def _compare(notes: list[dict[str, Any]], folder: Path, name: str) -> list[dict[str, Any]]:
    """Add our numbers and a verdict to each value of the ``notes`` of published.toml.

    A verdict judges the committed results if they exist, otherwise the results in ``folder``.
    """
    import pandas as pd

    def measured(value: dict[str, Any], folder: Path) -> pd.Series:
        table = folder / value.get("table", "rows.csv")
        if not table.exists():
            return pd.Series(dtype=float)
        return pd.read_csv(table).query(value["where"], engine="python")[value["column"]].dropna()

    def compared(note: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
        ours = measured(value, folder)
        judged = measured(value, committed(name)) if committed(name).exists() else ours
        texts = {"ours": _range(ours, value["format"]), "judged": _range(judged, value["format"])}
        verdict = _verdict(value["published"], judged)
        if verdict and note.get("uncounted"):
            verdict = f"{note['uncounted']}: {verdict}"
        return {**value, **texts, "verdict": verdict}

    return [{**n, "values": [compared(n, value) for value in n.get("values", [])]} for n in notes]


def _verdict(published: str, measured: pd.Series) -> str:
    """The verdict on our numbers beside a published number or range; "" if there are none of ours.

    "within 10 %" means that each number of ours is at most 10 % below or above the published number
    or range; "ranges overlap" means that this is not so, but both are ranges and have a part in
    common; otherwise the verdict is our smallest and our largest number, each divided by the
    published number or by the nearer end of the published range.
    """
    if measured.empty:
        return ""
    unit = 0.01 if "%" in published else 1
    numbers = [unit * float(number) for number in re.findall(r"\d+(?:\.\d+)?", published)]
    low, high, smallest, largest = min(numbers), max(numbers), measured.min(), measured.max()
    ratios = [round(n / min(max(n, low), high), 6) for n in (smallest, largest)]
    if ratios[0] >= 0.9 and ratios[1] <= 1.1:
        return WITHIN
    if low < high and smallest < largest and low <= largest and smallest <= high:
        return OVERLAP
    return " to ".join(dict.fromkeys(map("{:.2f}".format, ratios))) + " times"


def _range(measured: pd.Series, form: str) -> str:
    if measured.empty:
        return "not in this grid"
    texts = [form.format(v).replace("%", "\u00a0%") for v in (measured.min(), measured.max())]
    return " to ".join(dict.fromkeys(texts))
