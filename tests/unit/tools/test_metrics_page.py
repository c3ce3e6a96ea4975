"""docs/reference/metrics.md contains every metric family that the source registers."""

import ast
from pathlib import Path

import pytest
from tools import metrics_page

from dynamo.core.metrics import MetricsRegistry
from dynamo.serving.metrics import FrontendMetrics


def test_every_registration_of_the_source_is_recorded() -> None:
    assert metrics_page.missed() == []


def test_families_of_a_real_registry_are_recorded_with_their_type() -> None:
    registry = MetricsRegistry()
    FrontendMetrics(registry)
    found, _ = metrics_page.recorded()
    known = {(one.name, one.kind, one.labels, one.help) for one in found}
    families = {(one.name, one.kind, one.label_names, one.help) for one in registry._families.values()}
    assert families <= known


def test_registrations_in_loops_and_local_functions_are_executed() -> None:
    source = """
def show(registry, prefix, unknown):
    def gauge(word, help):
        return registry.gauge(f"{prefix}_{word}", help, ("a",))
    unknown.connect()
    for word in ("one", "two"):
        gauge(word, "Number")
    if unknown.is_there:
        return registry.counter("c_total", "Counter").labels()
"""
    (function,) = metrics_page.functions(ast.parse(source))
    recorder = metrics_page.Recorder("package")
    metrics_page.execute(function, recorder, {}, "file.py")
    assert {(one.name, one.kind, one.labels) for one in recorder.metrics} == {
        ("dynamo_frontend_one", "gauge", ("a",)),
        ("dynamo_frontend_two", "gauge", ("a",)),
        ("c_total", "counter", ()),
    }


def test_execution_creates_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = """
def open_store(registry, options):
    folder = Path(options.folder)
    store = folder.mkdir(parents=True)
    registry.counter("stored_total", "Stored objects")
"""
    (function,) = metrics_page.functions(ast.parse(source))
    recorder = metrics_page.Recorder("package")
    metrics_page.execute(function, recorder, {"Path": Path}, "file.py")
    assert [one.name for one in recorder.metrics] == ["stored_total"]
    assert list(tmp_path.iterdir()) == []
