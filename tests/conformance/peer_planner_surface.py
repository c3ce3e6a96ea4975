"""The released planner's control API, metrics and reports behind `peer_planner`; runs in the environment of `benchmarks.planner_peer`."""

import asyncio
import functools


def base_planner(case):
    """Return a released planner of a configuration without an environment, with the GPUs of each role's replica."""
    from dynamo.planner.core.base import NativePlannerBase
    from dynamo.planner.core.types import EngineCapabilities, WorkerCapabilities

    from dynamo.planner.config.planner_config import PlannerConfig

    class Planner(NativePlannerBase):
        def __init__(self):
            self.config = PlannerConfig(**case["config"])
            self._config_lock = asyncio.Lock()
            self._effect_admission_lock = asyncio.Lock()
            self._config_generation = 0

        def _build_worker_capabilities(self):
            prefill, decode = (None if one is None else EngineCapabilities(num_gpu=one) for one in case["gpus"])
            return WorkerCapabilities(prefill=prefill, decode=decode)

    return Planner()


def control(case):
    """Return status and body of each request to the control API."""
    import aiohttp
    from aiohttp import test_utils

    from dynamo.planner.control_api import _build_app

    async def run():
        found = []
        async with test_utils.TestServer(_build_app(base_planner(case))) as server, aiohttp.ClientSession() as session:
            for method, body in case["requests"]:
                async with session.request(method, server.make_url("/v1/min-endpoints"), data=body) as response:
                    is_json = response.content_type == "application/json"
                    found.append([response.status, await response.json() if is_json else None])
        return found

    return asyncio.run(run())


def metrics(case):
    """Return the metric families."""
    return families()


@functools.cache
def families():
    """Return type, label names and (of a histogram) bounds of each metric family."""
    from dynamo.planner.monitoring import planner_metrics
    from prometheus_client import REGISTRY, CollectorRegistry

    planner_metrics.PlannerPrometheusMetrics()
    registry = CollectorRegistry()
    made = planner_metrics.PluginFrameworkMetrics(registry)
    found = {}
    for family in REGISTRY.collect():
        if family.name.startswith("dynamo_planner"):  # An enumeration is a gauge in the text format.
            assert family.type in ("gauge", "stateset"), family.type
            labels = sorted({name for sample in family.samples for name in sample.labels})
            states = [label for sample in family.samples for label in sample.labels.values()]
            found[family.name] = {"type": "gauge", "labels": labels, "states": states}
    for name in ("engine_queued_prefill_tokens", "engine_queued_decode_kv_tokens", "engine_inflight_decode_kv_tokens"):
        found["dynamo_planner_" + name] = {"type": "gauge", "labels": ["dp_rank", "worker_id"], "states": []}
    for family in vars(made).values():
        name = family._name + ("_total" if family._type == "counter" else "")
        found[name] = {"type": family._type, "labels": sorted(family._labelnames), "states": []}
        if family._type == "histogram":
            found[name]["bounds"] = [float(one) for one in family._upper_bounds][:-1]
    return found


def report(case):
    """Return the rows of a report's log, its file names, and panels, traces and title of its charts."""
    import gzip
    import json
    import os
    import tempfile

    from dynamo.planner.monitoring.diagnostics_recorder import DiagnosticsRecorder, PerEngineFpm, TickSnapshot
    from plotly import graph_objects

    from dynamo.planner.config.planner_config import PlannerConfig

    figures, draw = [], graph_objects.Figure.to_html

    def to_html(figure, **how):
        figures.append(figure)
        return "<html></html>"

    with tempfile.TemporaryDirectory() as directory:
        recorder = DiagnosticsRecorder(
            PlannerConfig(**case["config"], report_output_dir=directory), max_kv_tokens=case["max_kv_tokens"]
        )
        for row in case["snapshots"]:
            engines = {
                name: [PerEngineFpm(**one) for one in row[name]] for name in ("prefill_engines", "decode_engines")
            }
            recorder._snapshots.append(TickSnapshot(**{**row, **engines}))
        graph_objects.Figure.to_html = to_html
        try:
            recorder.generate_report()
        finally:
            graph_objects.Figure.to_html = draw
        names = sorted(os.listdir(directory))
        with gzip.open(os.path.join(directory, next(one for one in names if one.endswith(".gz"))), "rt") as file:
            rows = [json.loads(line) for line in file]
    (figure,) = figures
    return {
        "names": names,
        "rows": rows,
        "title": figure.layout.title.text,
        "notes": sorted(one.text for one in figure.layout.annotations if one.text),
        "traces": sorted(
            [one.name, list(one.y), list(one.text) if one.text is not None else None] for one in figure.data
        ),
    }


FUNCTIONS = (control, metrics, report)
