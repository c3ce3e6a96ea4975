"""Names of metrics that upstream's users import are those that we show."""

from dynamo import prometheus_names as names
from dynamo.core.metrics import MetricsRegistry
from dynamo.serving.metrics import FrontendMetrics


def test_prometheus_names_are_used_by_the_frontend_metrics() -> None:
    registry = MetricsRegistry()
    FrontendMetrics(registry, names.name_prefix.FRONTEND)
    shown = registry.render()
    for name in (
        names.frontend_service.DISCONNECTED_CLIENTS,
        names.frontend_perf.STAGE_REQUESTS,
    ):
        assert f"{names.name_prefix.FRONTEND}_{name}" in shown
