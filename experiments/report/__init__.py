"""One page of all results, beside what publications report: ``python -m experiments report``.

``page.html`` is its template, ``captions.toml`` says what to see in each figure and
``published.toml`` has the published numbers.  The page is
self-contained and needs no network: figures in 128 colours, tables, and the curves of the hit rates
by Bokeh.
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

from experiments import eviction, style
from experiments.harness import Experiment, OptionsError
from experiments.harness.store import write_atomically

if TYPE_CHECKING:
    import pandas as pd
    from bokeh.plotting import figure

_FOLDER = Path(__file__).parent
_COMMITTED = _FOLDER.parents[1] / "results"
_AGREES = 0.1
"""Relative difference up to which a number agrees with the published one."""
_BOUNDS = ["infinite", "belady", "reuse_oracle"]
_SHOWN = ["infinite", "belady", eviction.OURS, "lru"]
_NUM_BEST = 4
"""Number of other policies whose curves are on at first: those with the best mean hit rates."""
_X_LABEL, _Y_LABEL = "pool size, of the unique blocks of the trace", "block hit rate"
_PERCENT = "0.[00]%"


def write_report(results: Path, output: Path, experiments: Mapping[str, Experiment]) -> Path:
    """Write the page of the results that ``results`` has of ``experiments`` to ``output``.

    Raises OptionsError if there are none, and OSError.
    """
    import jinja2
    from bokeh.resources import Resources

    published, captions = (
        tomllib.loads((_FOLDER / name).read_text().replace(" %", "\u00a0%"))
        for name in ("published.toml", "captions.toml")
    )
    pages, absent = [], []
    for name, experiment in experiments.items():
        tables = sorted((results / name).glob("*/rows.csv"))
        notes = published.get(name, [])
        committed = _COMMITTED / name / "cpu"
        says = captions.get(name, {})
        beside = dict.fromkeys(tables[:1], notes)
        pages += [_page(experiment, t.parent, beside.get(t, []), committed, says) for t in tables]
        if not tables:
            absent.append({**_describe(experiment), "published": _compare(notes, None, committed)})
    if not pages:
        raise OptionsError(f"no rows.csv in a folder of {results}: run an experiment first")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True
    )
    library = Resources(mode="inline", components=["bokeh"]).js_raw[0]
    page = environment.get_template("page.html").render(
        pages=pages,
        absent=absent,
        library=library,
        is_committed=results.resolve() == _COMMITTED,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    return output


def _page(
    experiment: Experiment,
    folder: Path,
    notes: list[dict[str, Any]],
    committed: Path,
    captions: dict[str, str],
) -> dict[str, Any]:
    """The template's values for the results in ``folder``."""
    summaries = sorted({*folder.glob("*.csv")} - {folder / "rows.csv"})
    return {
        **_describe(experiment),
        "device": folder.name,
        "id": f"{experiment.name}-{folder.name}",
        "environment": json.loads((folder / "environment.json").read_text()),
        "figures": [
            {**_picture(path), "caption": captions.get(path.stem, "")}
            for path in sorted(folder.glob("*.png"))
        ],
        "curves": _hit_rates(folder) if experiment.name == "eviction" else None,
        "published": _compare(notes, folder, committed),
        "tables": [_table(path) for path in (*summaries, folder / "rows.csv")],
    }


def _describe(experiment: Experiment) -> dict[str, Any]:
    """Name, question and method: the docstring of the experiment."""
    text = inspect.getdoc(inspect.getmodule(type(experiment.options))) or experiment.figure
    question, _, method = text.partition("\n\n")
    return {
        "name": experiment.name,
        "figure": experiment.figure,
        "gpu": experiment.gpu,
        "question": _markdown(question.rstrip(".")),
        "method": _markdown(method),
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
    """Name, columns that vary, their rows as texts, and the values of the other columns."""
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
    """``text``; numbers are rounded to five digits."""
    if not re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", text) or text.isdigit():
        return text
    return f"{float(text):.5g}"


def _compare(
    notes: list[dict[str, Any]], folder: Path | None, committed: Path
) -> list[dict[str, Any]]:
    """``notes`` of published.toml; each value has the committed number, that of ``folder``, and a
    verdict on the committed one."""
    import pandas as pd

    read = functools.cache(pd.read_csv)

    def measured(value: dict[str, Any], folder: Path | None) -> pd.Series:
        table = folder and folder / value.get("table", "rows.csv")
        if not table or not table.exists():
            return pd.Series(dtype=float)
        found = read(table).query(value["where"], engine="python")[value["column"]]
        return found.nlargest(1) if value.get("take") == "max" else found

    compared = []
    for note in notes:
        values = []
        for value in note.get("values", []):
            here = measured(value, committed)
            texts = [
                _range(numbers, value["format"]) for numbers in (here, measured(value, folder))
            ]
            verdict = _verdict(value["published"], here)
            values.append({**value, "committed": texts[0], "ours": texts[1], "verdict": verdict})
        compared.append({**note, "values": values})
    return compared


def _verdict(published: str, measured: pd.Series) -> str:
    """Whether the measured numbers meet the published range, or by which factor they miss it."""
    if measured.empty:
        return ""
    unit = 0.01 if "%" in published else 1
    theirs = [unit * float(number) for number in re.findall(r"\d+(?:\.\d+)?", published)]
    low, high, least, most = min(theirs), max(theirs), measured.min(), measured.max()
    if most * (1 + _AGREES) >= low and least <= high * (1 + _AGREES):
        return "agrees"
    return f"{most / low:.2g} times" if most < low else f"{least / high:.2g} times"


def _range(measured: pd.Series, form: str) -> str:
    if measured.empty:
        return "not in this grid"
    least, most = (
        form.format(value).replace("%", "\u00a0%") for value in (measured.min(), measured.max())
    )
    return least if least == most else f"{least} to {most}"


def _hit_rates(folder: Path) -> dict[str, Any]:
    """Script and places of interactive panels, one per trace, and the policies to switch on."""
    import pandas as pd
    from bokeh.embed import components
    from markupsafe import Markup

    rows = pd.read_csv(folder / "rows.csv").dropna(subset=["block_hit_rate"])
    infinite = rows[rows["policy"] == "infinite"]
    start = rows["capacity_fraction"].min()
    rows = pd.concat([infinite.assign(capacity_fraction=start), rows])
    means = rows.groupby("policy")["block_hit_rate"].mean()
    best = means.drop([*_SHOWN, *_BOUNDS], errors="ignore").nlargest(_NUM_BEST).index
    looks = style.policy_lines(dict.fromkeys([*_SHOWN, *best, *rows["policy"]]))
    shown = {*_SHOWN, *best}
    panels = [
        _panel(str(trace), of_trace, looks, shown)
        for trace, of_trace in rows.groupby("trace", sort=False)
    ]
    script, places = components(tuple(panels))
    return {
        "script": Markup(script),
        "places": [Markup(place) for place in places],
        "switches": [(name, look, name in shown) for name, look in looks.items()],
    }


def _panel(title: str, rows: pd.DataFrame, looks: dict[str, dict], shown: set[str]) -> figure:
    from bokeh.models import NumeralTickFormatter
    from bokeh.plotting import figure

    panel = figure(
        title=title,
        height=380,
        sizing_mode="stretch_width",
        x_axis_type="log",
        x_axis_label=_X_LABEL,
        y_axis_label=_Y_LABEL,
        tools="pan,box_zoom,wheel_zoom,reset,hover",
        active_drag=None,  # else a thumb that scrolls the page would zoom
        tooltips=[
            ("policy", "@label"),
            (_X_LABEL, f"@x{{{_PERCENT}}}"),
            (_Y_LABEL, f"@y{{{_PERCENT}}}"),
        ],
    )
    panel.toolbar.logo = None
    panel.axis.formatter = NumeralTickFormatter(format=_PERCENT)
    for policy, of_policy in rows.groupby("policy", sort=False):
        points = of_policy.sort_values("capacity_fraction")
        look = looks[str(policy)]
        data = {"x": points["capacity_fraction"], "y": points["block_hit_rate"]}
        data["label"] = [look["label"]] * len(points)
        _, dashes = (0, ()) if look["linestyle"] == "solid" else look["linestyle"]
        same = {"name": policy, "color": look["color"], "visible": policy in shown}
        panel.line("x", "y", source=data, line_dash=[round(2 * dash) for dash in dashes], **same)
        panel.scatter("x", "y", source=data, size=5, **same)
    return panel
