"""Upstream's dashboards: every metric and label of their queries is ours, or the difference has a reason."""

import pytest
from tools.upstream_dashboards import DASHBOARDS, REASONS, differences


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_differences_of_a_dashboard_have_reasons(dashboard: str) -> None:
    assert set(differences(dashboard)) <= REASONS.keys()


def test_every_reason_is_that_of_a_difference() -> None:
    assert REASONS.keys() == {found for dashboard in DASHBOARDS for found in differences(dashboard)}
