"""Upstream's dashboards: every metric and label of their queries is ours, or the difference has a reason."""

import pytest
from tools.upstream_dashboards import DASHBOARDS, REASONS, differences


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_differences_of_a_dashboard_have_reasons(dashboard: str) -> None:
    assert set(differences(dashboard)) <= REASONS.keys()


def test_reasons_belong_to_metrics_of_the_dashboards() -> None:
    named = {name for metrics in DASHBOARDS.values() for name in metrics}
    assert {one.split()[0] for one in REASONS} <= named
