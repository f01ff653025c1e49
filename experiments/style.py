"""Style of all figures: a style file, a line style for each policy, and reproducible files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.harness.store import write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series  # noqa: F401  experiments name style.Series

_STYLE_FILE = Path(__file__).with_name("pagelab.mplstyle")
_FORMATS = {"pdf": {"CreationDate": None, "Producer": None}, "png": {"Software": None}}
"""File formats of figures.  Without this metadata the same figure gives the same bytes."""

# Okabe and Ito's colours for colour-blind readers.  Markers and dashes differ, too: for grey print.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PINK, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#777777"
VIOLET = "#5B2C9F"  # of users' policies alone

Look = dict[str, Any]
"""Keyword arguments of a drawing function of matplotlib."""

BOUND: Look = {"color": BLACK, "linestyle": "dashed", "linewidth": 1}
"""Line properties for a line that marks a bound."""

_DASHES = {"dashed": (4, 1.5), "dotted": (1, 1.2), "dashdot": (4, 1.2, 1, 1.2)}


def line(color: str, marker: str, dashes: str = "solid", fill: bool = True) -> Look:
    """Line properties for ``Axes.plot``.  dashes: "solid", "dashed", "dotted" or "dashdot"."""
    return {
        "color": color,
        "marker": marker,
        "linestyle": "solid" if dashes == "solid" else (0, _DASHES[dashes]),
        "markerfacecolor": color if fill else "white",
    }


def dots(color: str, marker: str, fill: bool = True) -> Look:
    """Properties for ``Axes.plot`` of points without a line."""
    return {**line(color, marker, fill=fill), "linestyle": "none", "markersize": 3}


def bar(color: str, hatch: str = "") -> Look:
    """Bar properties for ``Axes.bar`` and ``Axes.barh``."""
    return {"color": color, "hatch": hatch, "edgecolor": BLACK, "linewidth": 0.4}


_POLICIES = {
    "infinite": ("infinite cache", {**line(GREY, "", "dotted"), "linewidth": 1.0}),
    "belady": ("Belady (optimum)", line(BLACK, "", "dashed")),
    "reuse_oracle": ("LRU knowing what returns", line(BLACK, "p", "dashdot")),
    "safeguarded": ("gittins, safeguarded (ours)", line(RED, ">")),
    "gittins": ("gittins (ours)", line(RED, "<", "dashed")),
    "lru": ("LRU", line(BLUE, "o")),
    "fifo": ("FIFO", line(ORANGE, "s")),
    "lfu": ("LFU", line(GREEN, "^")),
    "slru": ("SLRU", line(SKY, "D")),
    "lru_k": ("LRU-K", line(RED, "v")),
    "two_q": ("2Q", line(PINK, "P")),
    "arc": ("ARC", line(PINK, "v", "dashed")),
    "s3fifo": ("S3-FIFO", line(BLUE, "s", "dashed", fill=False)),
    "sieve": ("SIEVE", line(GREEN, "o", "dashed", fill=False)),
    "mq": ("MQ", line(ORANGE, "^", "dashed", fill=False)),
    "gdsf": ("GDSF", line(SKY, "v", "dashdot", fill=False)),
    "random": ("random", line(GREY, "x")),
    "mru": ("MRU", line(GREY, "+", "dashdot")),
    "filo": ("FILO", line(PINK, "<", "dotted")),
    "tlru": ("T-LRU", line(BLUE, "d", "dashdot")),
    "workload_aware": ("workload-aware", line(GREEN, "p", "dashed")),
    "random_leaf": ("random leaf", line(PINK, "8", "dashed")),
    "marconi": ("Marconi", line(SKY, "P", "dashed")),
    "retention": ("TensorRT-LLM retention", line(ORANGE, "h", "dotted")),
    "sglang_slru": ("SGLang SLRU", line(SKY, "8", "dotted")),
    "frequency_cost": ("frequency and cost", line(GREEN, "v", "dotted")),
    "queue_informed": ("LRU knowing the queue", line(PINK, "X", "dashdot")),
    "session_end": ("LRU knowing session ends", line(BLUE, "p", "dotted")),
    "ttl": ("time to live", line(RED, "s", "dashdot")),
    "session_gap": ("pause of the session (ours)", line(BLACK, "*", "dashdot")),
}

_IN_TURN = (
    line(BLUE, "o"),
    line(ORANGE, "s"),
    line(GREEN, "^", "dashed"),
    line(RED, "v", "dashdot"),
    line(PINK, "D", "dotted"),
    line(SKY, "X"),
    line(GREY, "x"),
    line(BLACK, "P", "dashed", fill=False),
)


def lines_of(names: Iterable[str]) -> dict[str, Look]:
    """Line properties and label for each name, in the order of ``names``."""
    return {name: {**look, "label": name} for name, look in zip(names, cycle(_IN_TURN))}


def policy_lines(policies: Iterable[str]) -> dict[str, Look]:
    """Line properties and label for each policy.

    A built-in policy looks the same in every figure.  Users' policies get thick lines in a
    colour of their own, with three markers in turn.
    """
    own = cycle(line(VIOLET, marker) for marker in "*ph")
    lines = {}
    for policy in policies:
        if policy in _POLICIES:
            label, look = _POLICIES[policy]
        else:
            label, look = policy, {**next(own), "linewidth": 1.8, "markersize": 5}
        lines[policy] = {**look, "label": label}
    return lines


def curve(axes: Axes, rows: DataFrame, x: str, y: str, times: float = 1, **look: Any) -> None:
    """Draw the column ``y``, multiplied by ``times``, against the column ``x``."""
    rows = rows.sort_values(x)
    axes.plot(rows[x], times * rows[y], **look)


@contextmanager
def figures() -> Iterator[None]:
    """Context that draws with the style file, without a display, and closes figures at its end."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    with plt.style.context(_STYLE_FILE):
        yield
        plt.close("all")


def panel_grid(
    count: int, *, height: float, width: float = 2.33, columns: int = 3, **options: Any
) -> tuple[Figure, list[Axes], list[Axes]]:
    """Make ``count`` panels of ``width`` x ``height`` inches, in rows of up to ``columns`` panels.

    Returns the figure, its panels in reading order, and the empty axes that fill the last row.
    options: options of ``matplotlib.pyplot.subplots``.
    """
    import matplotlib.pyplot as plt

    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        squeeze=False,
        figsize=(max(3.5, width * columns), 0.5 + height * rows),
        **options,
    )
    panels, spare = list(axes.flat[:count]), list(axes.flat[count:])
    for axis in spare:
        axis.set_axis_off()
    for axis in panels[-columns:]:
        axis.xaxis.set_tick_params(labelbottom=True)
    return figure, panels, spare


def log_x(axes: Axes, ticks: Sequence[float] = (), base: int = 10) -> None:
    """Make the x axis logarithmic, with plain numbers at ``ticks`` or at the powers of ``base``."""
    axes.set_xscale("log", base=base)
    if len(ticks):
        axes.set_xticks(ticks, map("{:g}".format, ticks))
    else:
        axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def plain_log_ticks(axis: Axis) -> None:
    """Write the ticks of a logarithmic ``axes.xaxis`` or ``yaxis`` as plain numbers.

    Call this function after drawing.  Ticks are at 1, 2, 5, 10 ...  They are closer on an axis that
    spans no more than a factor of 10.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    if low <= 0:  # the axis has no data
        axis.set_view_interval(1, 10, ignore=True)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Make a row for each name, at y = 0, 1 ... from the top."""
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_ylim(len(names) - 0.4, -0.6)


def shared_legend(
    figure: Figure,
    spare: Sequence[Axes] = (),
    columns: int = 6,
    *,
    xlabel: str = "",
    ylabel: str = "",
) -> Figure:
    """Draw one legend for all panels, with each label once; returns the figure.

    The legend is drawn in the first of the ``spare`` axes.  Without ``spare`` it is drawn above the
    panels, with as many columns as fit, up to ``columns``.  xlabel, ylabel: labels of the figure.
    """
    figure.supxlabel(xlabel)
    figure.supylabel(ylabel)
    entries: dict[str, Artist] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    handles, labels = [*entries.values()], [*entries]
    if spare:
        spare[0].legend(handles, labels, loc="center", ncols=1 if len(entries) <= 8 else 2)
    else:
        for ncols in range(min(columns, len(entries)), 0, -1):
            legend = figure.legend(handles, labels, loc="outside upper center", ncols=ncols)
            if ncols == 1 or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()
    return figure


def of_parts(make: Callable[[DataFrame], Any], *parts: str) -> Callable[[DataFrame], Any]:
    """Apply ``make`` to the rows of these parts of an experiment; None if there are none."""

    def made(rows: DataFrame) -> Any:
        rows = rows[rows["part"].isin(parts)]
        return None if rows.empty else make(rows)

    return made


def plotter(
    draw: Mapping[str, Callable[[DataFrame], Figure | None]],
    tables: Mapping[str, tuple[Callable[[DataFrame], DataFrame | None], str]] | None = None,
    *,
    measured: str | None = None,
) -> Callable[[DataFrame, Path], list[Path]]:
    """Make the function ``plot`` of an experiment.

    draw: by file name: a function from rows to a figure or None.
    tables: by file name: a function from rows to a table or None, and the format of floats.
    measured: name of a column.  Rows without a value in this column are left out.
    """

    def plot(rows: DataFrame, folder: Path) -> list[Path]:
        if measured:
            rows = rows.dropna(subset=measured)
        if rows.empty:
            return []
        written = []
        with figures():
            for name, make in draw.items():
                if (figure := make(rows)) is not None:
                    written += save(figure, folder, name)
        for name, (make, digits) in (tables or {}).items():
            if (table := make(rows)) is not None:
                written.append(folder / f"{name}.csv")
                write_atomically(written[-1], table.to_csv(index=False, float_format=digits))
        return written

    return plot


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name``.pdf and ``name``.png; returns their paths."""
    written = []
    for suffix, entries in _FORMATS.items():
        content = io.BytesIO()
        figure.savefig(content, format=suffix, metadata=entries)
        path = folder / f"{name}.{suffix}"
        write_atomically(path, content.getvalue())
        written.append(path)
    return written
