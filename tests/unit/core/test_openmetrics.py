"""OpenMetrics: negotiation, and equal values from both formats in a strict parser."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from dynamo.core.metrics import MetricsRegistry
from dynamo.core.openmetrics import openmetrics, prefers_openmetrics

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "wants"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;q=often", False),
    ],
)
def test_openmetrics_is_chosen_only_when_the_scraper_prefers_it(accept: str, wants: bool) -> None:
    assert prefers_openmetrics(accept) is wants


def test_openmetrics_and_text_format_contain_the_same_samples() -> None:
    registry = MetricsRegistry()
    registry.counter("requests_total", 'With "quotes" and \\ a backslash', ["model"]).labels(model='a"b,le="1"').inc(2)
    registry.counter("oddly_named", "A counter of upstream's without the suffix").labels().inc(3)
    registry.gauge("depth", "A gauge").labels().set(0.5)
    histogram = registry.histogram("seconds", "A histogram", ["model"], (0.5, 1, 10)).labels(model="m")
    histogram.observe(0.7)
    registry.add_text(lambda: "# no help\n# TYPE engine_thing untyped\nengine_thing 7\n")
    text = registry.render()
    converted = openmetrics(text)
    assert converted.endswith("# EOF\n")
    families = {family.name: family.type for family in read_openmetrics(converted)}
    assert families == {
        "requests": "counter", "oddly_named": "unknown", "depth": "gauge", "seconds": "histogram", "engine_thing": "unknown",
    }  # fmt: skip

    def samples(found: object) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
        return sorted(
            (one.name, tuple((key, str(float(value)) if key == "le" else value) for key, value in one.labels.items()), one.value)
            for family in found  # type: ignore[attr-defined]
            for one in family.samples
        )  # fmt: skip

    in_text = text.replace(
        "oddly_named", "oddly_named_total"
    )  # This reader appends the suffix itself, the other does not.
    in_openmetrics = converted.replace("oddly_named 3", "oddly_named_total 3").replace(
        "oddly_named unknown", "oddly_named counter"
    )
    assert samples(read_openmetrics(in_openmetrics)) == samples(read_text(in_text))


def test_openmetrics_exposition_without_samples_is_valid() -> None:
    assert openmetrics("") == "# EOF\n"
