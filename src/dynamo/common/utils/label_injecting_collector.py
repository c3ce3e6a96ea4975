"""LabelInjectingCollector: the metrics of a Prometheus registry with further labels."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.registry import Collector

RESERVED = frozenset({"le", "quantile"})
"""Labels of histograms and summaries."""


class LabelInjectingCollector(Collector):
    """Collector of another registry's metrics, to which labels are added; a metric's own labels have precedence."""

    def __init__(self, source_registry: Any, labels_to_inject: Mapping[str, str]) -> None:
        if not labels_to_inject:
            raise ValueError("labels_to_inject cannot be empty")
        if reserved := RESERVED.intersection(labels_to_inject):
            raise ValueError(f"Cannot inject reserved label names: {sorted(reserved)}")
        self.source_registry, self.labels_to_inject = source_registry, labels_to_inject

    def collect(self) -> Iterator[Any]:
        """Yield the metrics with the labels."""
        from prometheus_client.metrics_core import Metric

        for family in self.source_registry.collect():
            labelled = Metric(family.name, family.documentation, family.type, family.unit)
            labelled.samples = [
                sample._replace(labels={**self.labels_to_inject, **sample.labels}) for sample in family.samples
            ]
            yield labelled

    def describe(self) -> Iterator[Any]:
        """Yield the metrics of the source, for the check for duplicates."""
        return iter(self.source_registry.collect())
