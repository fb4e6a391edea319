from __future__ import annotations

from xml.etree import ElementTree

import pytest

from hicache_cli.svg import Axis, Line, chart


def drawn(lines, x, y):
    text = chart(lines, x, y)
    return ElementTree.fromstring(f"<div>{text}</div>")


def test_points_are_placed_linearly_between_the_axes():
    root = drawn([Line("a", [(0, 0), (5, 1), (10, 2)])], Axis("x"), Axis("y"))
    (polyline,) = root.iter("polyline")
    assert polyline.get("points") == "70.0,270.0 400.0,145.0 730.0,20.0"


def test_a_logarithmic_axis_spaces_decades_equally():
    root = drawn([Line("a", [(1, 0), (10, 1), (100, 2)])], Axis("x", log=True), Axis("y"))
    (polyline,) = root.iter("polyline")
    assert [point.split(",")[0] for point in polyline.get("points").split()] == ["70.0", "400.0", "730.0"]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.5, 2000.0, ["1", "10", "100", "1e+03"]),
        (3.0, 60.0, ["5", "10", "20", "50"]),
        (3.1, 3.4, ["3.1", "3.4"]),
    ],
)
def test_a_logarithmic_axis_has_round_labels_or_its_ends(low, high, labels):
    root = drawn([Line("a", [(low, 0), (high, 1)])], Axis("x", log=True), Axis("y"))
    texts = [text for text in root.iter("text") if text.get("y") == "288.0"]
    assert [text.text for text in texts] == labels


def test_labels_are_escaped_and_each_line_is_in_the_legend():
    root = drawn([Line("<b>&", [(0, 0)]), Line("c", [(1, 1)])], Axis("x<"), Axis("y&"))
    assert [item.text or "".join(item.itertext()) for item in root.iter("li")] == ["<b>&", "c"]


def test_marked_points_tell_their_value():
    root = drawn([Line("a", [(1, 2)], marked=True)], Axis("x"), Axis("y", text="{:.1f} GiB/s".format))
    assert [title.text for title in root.iter("title")] == ["a: 1, 2.0 GiB/s"]


@pytest.mark.parametrize("points", [[(0.0, 0.0)], [(3.0, 3.0), (3.0, 3.0)], [(1e-9, 1e12)], [(-1.0, -5.0)]])
def test_extreme_ranges_draw_something(points):
    for log in (False, True):
        root = drawn([Line("a", points)], Axis("x", log=log), Axis("y"))
        assert len(list(root.iter("polyline"))) == 1


def test_no_samples_are_said():
    assert chart([Line("a", [])], Axis("x"), Axis("y")) == "<p>No samples.</p>"
