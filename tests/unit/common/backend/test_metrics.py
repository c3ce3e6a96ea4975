"""Metrics of an engine in those of its worker."""

from typing import Any

import pytest

from dynamo.common.backend import metrics


class Registered:
    """The registration of an engine's metrics."""

    auto_labels = {"model": "m"}

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.families: list[Any] = []

    def register_prometheus_expfmt_callback(self, callback: Any) -> None:
        self.texts.append(callback)

    def register_prometheus_typed_callback(self, callback: Any) -> None:
        self.families.append(callback)


def test_registry_is_exposed_with_the_workers_labels_and_without_other_prefixes() -> None:
    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    for name in ("mine_a", "mine_b", "other"):
        Gauge(name, name, registry=registry).set(1)
    registered: Any = Registered()
    metrics.register_engine_registry(registered, registry, prefix_filters=["mine_"], exclude_prefixes=["mine_b"])
    (text,) = registered.texts
    assert [line for line in text().splitlines() if not line.startswith("#")] == ['mine_a{model="m"} 1.0']
    (families,) = registered.families
    assert [family[0] for family in families()] == ["mine_a"]


def test_directory_of_process_metrics_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    directory = metrics.ensure_prometheus_multiproc_dir("engine_")
    assert directory is not None
    with directory:
        assert metrics.ensure_prometheus_multiproc_dir("engine_") is None
