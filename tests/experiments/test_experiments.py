"""Contract of every experiment: its command line at a tiny size, and the options it refuses."""

import io
import re
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from experiments import cli, style
from experiments.harness import Absent, plot_results
from experiments.harness.grid import check
from experiments.registry import EXPERIMENTS

RESULTS = Path(__file__).parents[2] / "results"
WITHOUT_TINY_RUN = {"kernel_latency", "kernel_accuracy"}
"""They have fixtures of their own."""
UNTIMED = {"block_size": 97, "memory_waste": 35, "published_serving": 5, "sharing": 7}
UNTIMED |= {"hybrid": 568}
"""Experiments that count or model, and how far apart the cells are that a test computes again."""


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - WITHOUT_TINY_RUN))
def test_a_tiny_run_gives_the_table_and_the_figures(name, tiny_run, tmp_path, monkeypatch):
    run = tiny_run(name)
    if (published := RESULTS / name / "cpu").exists():
        assert set(run.rows) == set(pd.read_csv(published / "rows.csv", nrows=0))
        written, committed = (
            {path.name for path in folder.iterdir() if path.suffix != ".pdf"}
            for folder in (run.folder, published)
        )
        kept = {".cells", "sweep.log"}  # by git ignored, for a run to resume
        assert written - kept == committed - kept
    assert all(path.stat().st_size > 5_000 for path in run.folder.glob("*.png"))
    monkeypatch.setattr(style, "save", lambda figure, folder, name: [folder / name])
    for part in parts_of(run.rows):
        (tmp_path / "rows.csv").write_text(part.to_csv(index=False))
        assert plot_results(EXPERIMENTS[name], tmp_path), "a table that lacks rows has figures too"


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_each_curve_of_a_figure_has_its_own_colour_and_marker(name, request, tmp_path, monkeypatch):
    """In the committed results, in a quick run if there is one here, and in a tiny run."""
    tables = [*RESULTS.glob(f"{name}/*/rows.csv"), *RESULTS.glob(f"quick/{name}/*/rows.csv")]
    if name not in WITHOUT_TINY_RUN:
        tables.append(request.getfixturevalue("tiny_run")(name).folder / "rows.csv")
    figures: list = []
    monkeypatch.setattr(style, "save", lambda figure, *_: figures.append(figure) or [])
    for table in tables:
        EXPERIMENTS[name].plot(pd.read_csv(table), tmp_path)
        while figures:
            figure, labels = figures.pop(), {}
            for axis in figure.axes:
                for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                    curve = handle[0] if isinstance(handle, tuple) else handle  # error bars
                    if hasattr(curve, "get_marker"):
                        hollow = curve.get_markerfacecolor() == "white"
                        look = curve.get_color(), curve.get_marker(), hollow
                        labels.setdefault(look, set()).add(label)
            assert not [names for names in labels.values() if len(names) > 1], table


@pytest.mark.parametrize("name", UNTIMED)
def test_committed_rows_are_what_the_code_gives(name):
    experiment, committed = EXPERIMENTS[name], pd.read_csv(RESULTS / name / "cpu" / "rows.csv")
    cells = list(experiment.checked_cells(experiment.options))
    rows = pd.DataFrame(
        row
        for cell in cells[UNTIMED[name] :: UNTIMED[name]]
        if not isinstance(cell, Absent)
        for row in experiment.run_cell(cell)
    )
    again = pd.read_csv(io.StringIO(rows.reindex(columns=committed.columns).to_csv(index=False)))
    again = again.astype(committed.dtypes).round(12)
    assert len(again.merge(committed.round(12).drop_duplicates())) == len(again) > 0


def parts_of(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Tables that lack cells: the first row alone, and each part of the experiment."""
    yield rows.head(1)
    for column in {"part", "model", "policy"} & set(rows):
        yield from (part for _, part in rows.groupby(column))


def numbers_in(hint) -> set[type]:
    if typing.get_origin(hint) is typing.Literal:
        return set()
    return {hint} & {int, float} | set().union(*map(numbers_in, typing.get_args(hint)))


def with_number(value, number):
    """``value`` of an option with ``number`` in every place."""
    if isinstance(value, tuple):
        return tuple(with_number(item, number) for item in value or (None,))
    return number


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_no_number_may_be_negative_and_few_may_be_0(name):
    experiment = EXPERIMENTS[name]
    options = experiment.options
    for option, hint in typing.get_type_hints(type(options), include_extras=True).items():
        if not numbers_in(hint):
            continue
        may_be_0 = option in ("seed", "draw", "host_ms", "cached_percent", "prefix_tokens")
        for number in (-1, 0)[: 2 - may_be_0]:
            left_open = getattr(options, option) is None
            value = getattr(experiment.quick if left_open else options, option)
            value = with_number(value, number)
            with pytest.raises(ValueError, match=f"^--{option.replace('_', '-')} "):
                check(replace(options, **{option: value}))


REFUSED = r"""
reproduce --quick --full| --quick or --full, not both
report| no rows\.csv in a folder of results
plot eviction| no rows\.csv in a folder of results/eviction: run the experiment first
run block_size --policy lruu: policy='lruu' is unknown; choose from
run engine --model huge: needs one of tiny, llama-100m
run eviction --policy lur: policy='lur' is unknown; choose from .*lru
run eviction --policy none.py:Mine| no file none\.py
run eviction --trace none.jsonl| none\.jsonl
run eviction --out /dev/null/x| --out: cannot write to /dev/null/x
run eviction --capacity-percent| --capacity-percent: needs at least one value
run eviction --jobs 0| jobs must be at least 1, got 0
run overhead --pool-blocks 100: needs an int of at least 512
run overhead --pool-requests 1: needs an int of at least 2
run kernel_accuracy --kernel x: needs one of .*copy_blocks
run preemption --context-tokens 0: needs an int of at least 1
run serving --system orca: needs one of contiguous_max
run shared_prefix --load orca: needs one of .*five_shot
run sharing --num-sequences 0: needs an int of at least 1
"""
"""``command: message after its options``, or ``command| message``."""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_bad_value_is_refused_with_its_option_and_writes_nothing(
    line, capsys, tmp_path, monkeypatch
):
    words, expected = re.fullmatch(r"(.*?)(\| .*|: .*)", line).groups()
    message = expected[2:] if expected[0] == "|" else words.split(maxsplit=2)[2] + expected
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
