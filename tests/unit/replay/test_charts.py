"""Charts: what a reader finds in them."""

from dynamo.replay.charts import MARKS_SHOWN, Mark, heat_map, plot


def test_plot_marks_what_is_within_its_range() -> None:
    text = plot(
        "Load", {"a": [(0.0, 1.0), (10.0, 2.0)]}, "s", marks=[Mark(4.0, "worker <2> fails"), Mark(99.0, "late")]
    )
    assert "<title>worker &lt;2&gt; fails</title>" in text
    assert "late" not in text
    many = plot("Load", {"a": [(0.0, 1.0), (10.0, 2.0)]}, "s", marks=[Mark(1.0, "again")] * 500)
    assert many.count("<title>again") == MARKS_SHOWN


def test_plot_without_points_has_no_data() -> None:
    assert "no data" in plot("Load", {}, "s")
    assert "no data" in heat_map("Load", {"0": [0.0, 0.0]}, 2.0, "requests")


def test_heat_map_is_darkest_where_the_value_is_highest_and_empty_where_it_is_zero() -> None:
    text = heat_map("Load", {"0": [0.0, 4.0], "1": [2.0, 0.0]}, 2.0, "requests")
    assert text.count("<rect") == 2
    assert "fill-opacity=1.00" in text
    assert "fill-opacity=0.50" in text
    assert "up to 4 requests" in text


def test_heat_map_of_many_workers_names_some_of_them() -> None:
    text = heat_map("Load", {f"{at}": [1.0] for at in range(100)}, 1.0, "requests")
    assert text.count("<rect") == 100
    assert 10 <= text.count("text-anchor=end") <= 60
