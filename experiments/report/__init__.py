"""One page of all results, beside what publications report: ``python -m experiments report``.

``page.html`` is its template, ``published.toml`` has the published numbers.  The page is
self-contained and needs no network: figures in 128 colours, tables, and the curves of the hit rates
by Bokeh.
"""

from __future__ import annotations

import base64
import functools
import inspect
import io
import itertools
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import style
from experiments.harness import Experiment, OptionsError
from experiments.harness.store import write_atomically

if TYPE_CHECKING:
    import pandas as pd
    from bokeh.plotting import figure

_FOLDER = Path(__file__).parent
_COMMITTED = _FOLDER.parents[1] / "results"
_AGREES = 0.1
"""Relative difference up to which a number agrees with the published one."""
_COLORS = [line["color"] for line in style.lines_of(range(8)).values()]
_X_LABEL, _Y_LABEL = "pool size, of the unique blocks of the trace", "block hit rate"
_PERCENT = "0.[00]%"


def write_report(results: Path, output: Path, experiments: Mapping[str, Experiment]) -> Path:
    """Write the page of the results that ``results`` has of ``experiments`` to ``output``.

    Raises OptionsError if there are none, and OSError.
    """
    import jinja2
    from bokeh.resources import Resources

    published = tomllib.loads((_FOLDER / "published.toml").read_text().replace(" %", "\u00a0%"))
    pages, absent = [], []
    for name, experiment in experiments.items():
        tables = sorted((results / name).glob("*/rows.csv"))
        notes = published.get(name, [])
        committed = _COMMITTED / name / "cpu"
        pages += [_page(experiment, table.parent, notes, committed) for table in tables]
        if not tables:
            absent.append({**_describe(experiment), "published": _compare(notes, None, committed)})
    if not pages:
        raise OptionsError(f"no rows.csv in a folder of {results}: run an experiment first")
    pages.sort(key=lambda page: not page["published"])  # stable
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
    experiment: Experiment, folder: Path, notes: list[dict[str, Any]], committed: Path
) -> dict[str, Any]:
    """The template's values for the results in ``folder``."""
    summaries = sorted({*folder.glob("*.csv")} - {folder / "rows.csv"})
    return {
        **_describe(experiment),
        "device": folder.name,
        "id": f"{experiment.name}-{folder.name}",
        "environment": json.loads((folder / "environment.json").read_text()),
        "figures": [_picture(path) for path in sorted(folder.glob("*.png"))],
        "curves": _hit_rates(folder) if experiment.name == "eviction" else None,
        "published": _compare(notes, folder, committed),
        "tables": [_table(path) for path in (*summaries, folder / "rows.csv")],
    }


def _describe(experiment: Experiment) -> dict[str, Any]:
    """Name, question and method: the docstring of the experiment."""
    text = inspect.getdoc(inspect.getmodule(experiment.run_cell)) or experiment.figure
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
    """Script and places of interactive panels, one per trace; a line is hidden in all at once."""
    import pandas as pd
    from bokeh.embed import components
    from markupsafe import Markup

    rows = pd.read_csv(folder / "rows.csv")
    policies = rows["policy"].unique()
    dashes = ["solid"] * len(_COLORS) + ["dashed"] * len(policies)
    looks = dict(zip(policies, zip(itertools.cycle(_COLORS), dashes, strict=False), strict=False))
    panels = [
        _panel(str(trace), of_trace.dropna(subset=["block_hit_rate"]), looks)
        for trace, of_trace in rows.groupby("trace", sort=False)
    ]
    for other in panels[1:]:
        for one, another in itertools.product(panels[0].renderers, other.renderers):
            if one.name == another.name:
                one.js_link("visible", another, "visible")
                another.js_link("visible", one, "visible")
    script, places = components(tuple(panels))
    return {"script": Markup(script), "places": [Markup(place) for place in places]}


def _panel(title: str, rows: pd.DataFrame, looks: dict[str, tuple[str, str]]) -> figure:
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
            ("policy", "@name"),
            (_X_LABEL, f"@x{{{_PERCENT}}}"),
            (_Y_LABEL, f"@y{{{_PERCENT}}}"),
        ],
    )
    panel.toolbar.logo = None
    panel.axis.formatter = NumeralTickFormatter(format=_PERCENT)
    for line, (color, dash) in looks.items():
        points = rows[rows["policy"] == line].sort_values("capacity_fraction")
        if points.empty:
            continue
        data = {"x": points["capacity_fraction"], "y": points["block_hit_rate"]}
        data["name"] = [line] * len(points)
        label = {"legend_label": line, "color": color}
        panel.line("x", "y", source=data, name=line, line_dash=dash, line_width=1.6, **label)
        panel.scatter("x", "y", source=data, name=f"{line} points", size=5, **label)
    legend = panel.legend[0]
    legend.click_policy, legend.ncols = "hide", 3
    legend.label_text_font_size, legend.spacing, legend.padding = "8pt", 6, 2
    panel.add_layout(legend, "below")
    return panel
