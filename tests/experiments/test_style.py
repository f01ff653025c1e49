"""The look of figures."""

import math

import pytest

import cache
from experiments import style


def draw(folder):
    with style.figures():
        figure, axes, spare = style.panel_grid(2, height=2)
        for axis in axes:
            axis.plot([1, 2], [3, 4], label="a line")
        style.shared_legend(figure, spare)
        return style.save(figure, folder, "figure")


def test_the_same_figure_gives_the_same_bytes_undated_and_in_truetype(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = draw(tmp_path / "a"), draw(tmp_path / "b")
    assert [path.name for path in first] == ["figure.pdf", "figure.png"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    pdf = first[0].read_bytes()
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf


@pytest.mark.parametrize("panels", [1, 2, 5])
def test_the_legend_stays_inside_the_figure(panels):
    with style.figures():
        figure, axes, spare = style.panel_grid(panels, height=2)
        for name in cache.POLICIES:
            axes[0].plot([1, 2], [3, 4], label=f"the policy {name}")
        style.shared_legend(figure, spare)
        figure.canvas.draw()
        legends = [*figure.legends, *(legend for a in spare if (legend := a.get_legend()))]
        (box,) = (legend.get_window_extent() for legend in legends)
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width


@pytest.mark.parametrize(
    "lines",
    [
        # There are three looks for users' policies: a built-in one without its own has one of them.
        style.policy_lines([*cache.POLICIES, "infinite", *(f"mine.py:{c}" for c in "ABC")]),
        style.lines_of("abcdefgh"),
    ],
    ids=["policies", "in turn"],
)
def test_no_two_lines_look_alike_nor_without_colour(lines):
    looks = {
        (str(line["linestyle"]), line["marker"], line["markerfacecolor"] == "white")
        for line in lines.values()
    }
    pairs = {(line["color"], line["marker"]) for line in lines.values()}
    assert len(looks) == len(pairs) == len(lines)
    assert len({line["label"] for line in lines.values()}) == len(lines)


@pytest.mark.parametrize(
    ("low", "high"),
    [(1.2, 5.5), (2, 5000), (16, 25), (0.03, 0.2), (math.nan, math.nan)],
    ids=lambda value: f"{value:g}",
)
def test_a_logarithmic_axis_has_ticks_enough_as_plain_numbers(low, high):
    with style.figures():
        figure, (axis,), _ = style.panel_grid(1, height=2)
        axis.set_yscale("log")
        axis.plot([0, 1], [low, high])
        style.plain_log_ticks(axis.yaxis)
        figure.canvas.draw()
        bottom, top = axis.get_ylim()
        seen = {
            label.get_text()
            for tick, label in zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
            if bottom <= tick <= top
        }
        assert len(seen) >= 2 + (high > 2 * low)
        assert not any("{" in text for text in seen), "no powers in TeX"


def test_ticks_of_a_logarithmic_x_axis_are_the_given_ones_or_powers():
    with style.figures():
        figure, axes, _ = style.panel_grid(2, height=2)
        for axis, ticks in zip(axes, ([3, 48], []), strict=True):
            axis.plot([3, 48], [1, 2])
            style.log_x(axis, ticks)
        figure.canvas.draw()
        given, powers = ([x.get_text() for x in axis.get_xticklabels()] for axis in axes)
    assert given == ["3", "48"]
    assert "10" in powers
