"""One page that shows all results beside published numbers: ``pagelab report``.

``page.html`` is the template, ``captions.toml`` has the figures' captions, and ``published.toml``
has the published numbers.  The page is self-contained and needs no network.
"""

from __future__ import annotations

import base64
import functools
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
_AGREES = 0.1
"""A number agrees with the published number up to this relative difference."""


def write_report(results: Path, output: Path, experiments: Mapping[str, Experiment]) -> Path:
    """Write a page to ``output``: the results of ``experiments`` in the folder ``results``.

    Raises OptionsError if there are no results, and OSError.
    """
    import jinja2

    published, captions = (
        tomllib.loads((_FOLDER / name).read_text().replace(" %", "\u00a0%"))
        for name in ("published.toml", "captions.toml")
    )
    pages = []
    for name, experiment in experiments.items():
        for number, table in enumerate(sorted((results / name).glob("*/rows.csv"))):
            notes = [] if number else _compare(published.get(name, []), table.parent, name)
            pages.append(_page(experiment, table.parent, notes, captions.get(name, {})))
    if not pages:
        raise OptionsError(f"no rows.csv in a folder of {results}: run an experiment first")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True
    )
    page = environment.get_template("page.html").render(
        pages=pages,
        absent=[e for name, e in experiments.items() if name not in {p["name"] for p in pages}],
        is_committed=results.resolve() == committed("").parent,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    return output


def _page(
    experiment: Experiment,
    folder: Path,
    published: list[dict[str, Any]],
    captions: dict[str, str],
) -> dict[str, Any]:
    """The template's values for the results in ``folder``."""
    # An experiment's docstring describes its question and its method.
    text = inspect.getdoc(inspect.getmodule(type(experiment.options))) or experiment.figure
    question, _, method = text.partition("\n\n")
    summaries = sorted({*folder.glob("*.csv")} - {folder / "rows.csv"})
    return {
        "name": experiment.name,
        "figure": experiment.figure,
        "question": _markdown(question.rstrip(".")),
        "method": _markdown(method),
        "device": folder.name,
        "id": f"{experiment.name}-{folder.name}",
        "environment": json.loads((folder / "environment.json").read_text()),
        "figures": [
            {**_picture(path), "caption": captions.get(path.stem, "")}
            for path in sorted(folder.glob("*.png"))
        ],
        "published": published,
        "tables": [_table(path) for path in (*summaries, folder / "rows.csv")],
    }


def _markdown(text: str) -> str:
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    text = re.sub(r":\w+:(?=`)", "", text)
    return Markup(MarkdownIt("commonmark", {"html": False}).render(text))


def _picture(path: Path) -> dict[str, Any]:
    from PIL import Image

    content = io.BytesIO()
    with Image.open(path) as image:
        width, height = image.size
        few = image.convert("RGB").quantize(128, Image.Quantize.FASTOCTREE)
        few.save(content, "WEBP", lossless=True)
    data = base64.b64encode(content.getvalue()).decode()
    return {"name": path.stem, "width": width, "height": height, "data": data}


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

    read = functools.cache(pd.read_csv)

    def measured(value: dict[str, Any], folder: Path) -> pd.Series:
        table = folder / value.get("table", "rows.csv")
        if not table.exists():
            return pd.Series(dtype=float)
        found = read(table).query(value["where"], engine="python")[value["column"]]
        return found.nlargest(1) if value.get("take") == "max" else found

    def compared(value: dict[str, Any]) -> dict[str, Any]:
        ours = measured(value, folder)
        judged = measured(value, committed(name)) if committed(name).exists() else ours
        texts = {"ours": _range(ours, value["format"]), "judged": _range(judged, value["format"])}
        return {**value, **texts, "verdict": _verdict(value["published"], judged)}

    return [{**note, "values": [*map(compared, note.get("values", []))]} for note in notes]


def _verdict(published: str, measured: pd.Series) -> str:
    """Whether the measured numbers meet the published range, or by which factor they miss it."""
    if measured.empty:
        return ""
    unit = 0.01 if "%" in published else 1
    numbers = [unit * float(number) for number in re.findall(r"\d+(?:\.\d+)?", published)]
    low, high, smallest, largest = min(numbers), max(numbers), measured.min(), measured.max()
    if largest * (1 + _AGREES) >= low and smallest <= high * (1 + _AGREES):
        return "agrees"
    return f"{largest / low if largest < low else smallest / high:.2g} times"


def _range(measured: pd.Series, form: str) -> str:
    if measured.empty:
        return "not in this grid"
    texts = [form.format(v).replace("%", "\u00a0%") for v in (measured.min(), measured.max())]
    return " to ".join(dict.fromkeys(texts))
