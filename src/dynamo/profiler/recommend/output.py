"""Output of a recommendation: table, front, assumptions, launch commands, compose file and graph. Pure."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynamo.planner.config.planner_config import Backend
from dynamo.profiler.graph.components import (
    BOOTSTRAP_PORT,
    MODEL_FLAG,
    WORKERS,
    engine_args,
    graph_of,
    main_container,
    role_args,
)
from dynamo.profiler.graph.features import add_planner, add_scaling_adapters, enable_benchmarks, planner_config, set_env
from dynamo.profiler.graph.images import backend_image
from dynamo.profiler.recommend.config import RecommendConfig
from dynamo.profiler.recommend.estimate import EstimateError
from dynamo.profiler.recommend.presets import LOAD_S_MIN, preset_config
from dynamo.profiler.recommend.simulation import CandidateDeployment, SimulatedResult
from dynamo.profiler.search import EngineChoice
from dynamo.profiler.spec import ProfileSpec
from dynamo.protocols.kubernetes.common import KubeObject

FRONTEND_PORT = 8000
ROWS_MAX = 12
KV_EVENTS_PORT, PORTS_PER_WORKER = 20080, 64
"""First port of KV events, and the ports of one worker: each data-parallel rank uses one."""
GRAPH_NAME = "recommended"
SIDE_CHANNEL_PORT = 5600
"""First port at which vLLM workers offer their KV cache."""


def table(
    results: Sequence[SimulatedResult], on_front: Sequence[SimulatedResult], share: float, estimate: EstimateError
) -> str:
    """Return the best results, fewest GPUs first, with the errors of the latencies; a star marks the Pareto front."""
    lines = [
        f"  {'GPUs':>4} {'met':>6} {'tok/s/GPU':>9} {'TTFT ms':>11} {'p95':>8} {'ITL ms':>11} {'reuse':>6}  deployment"
    ]
    ordered = sorted(results, key=lambda one: (one.met_share < share, one.mean_gpus, -one.goodput))
    alike: dict[str, list[SimulatedResult]] = {}
    for one in ordered:
        alike.setdefault(_numbers(one, estimate), []).append(one)
    rows = list(alike.items())[:ROWS_MAX]
    return "\n".join([*lines, *(_table_row(numbers, group, on_front) for numbers, group in rows)])


def _table_row(numbers: str, group: Sequence[SimulatedResult], on_front: Sequence[SimulatedResult]) -> str:
    """Return the row of deployments whose numbers are equal: the first one, and how many others there are."""
    others = f" (and {len(group) - 1} alike)" if len(group) > 1 else ""
    mark = "*" if any(one in on_front for one in group) else " "
    return f"{mark} {numbers}  {group[0].candidate.label()}{others}"


def _numbers(one: SimulatedResult, estimate: EstimateError) -> str:
    ttft = f"{one.ttft_ms:.0f} ±{estimate.ttft * one.ttft_ms:.0f}"
    itl = f"{one.itl_ms:.1f} ±{estimate.itl * one.itl_ms:.1f}"
    return (
        f"{one.mean_gpus:>4.3g} {100 * one.met_share:>5.1f}% {one.goodput_per_gpu:>9.0f} "
        f"{ttft:>11} {one.p95_ttft_ms:>8.0f} {itl:>11} {100 * one.reused_share:>5.0f}%"
    )


def summary(best: SimulatedResult) -> str:
    """Return the recommended deployment in words."""
    gpus = f"{best.candidate.gpus} GPUs"
    if best.candidate.preset is not None:
        gpus = f"{best.mean_gpus:.1f} GPUs on average, {gpus} at the start"
    return f"{best.candidate.label()}, {gpus}"


def sureness(slower: SimulatedResult, estimate: EstimateError, share: float) -> str:
    """Return how the recommended deployment does if the estimate is too fast by its error."""
    result = f"{100 * slower.met_share:.1f} % of the requests meet the objectives"
    remedy = "" if slower.met_share >= share else "; use one more engine, or measure yours (--points)"
    return f"if every step takes {100 * estimate.itl:.0f} % longer than estimated, {result}{remedy}"


def assumptions(config: RecommendConfig, estimate: EstimateError, *, uses_presets: bool) -> list[str]:
    """Return what the recommendation rests on, one line each."""
    load = (
        f"the first {config.requests} requests of {config.trace}, at their recorded times and with their common prefixes"
        if config.trace is not None
        else f"{config.requests} generated requests at random times, {config.request_rate:g} per second, "
        f"{config.isl} prompt and {config.osl} answer tokens, {100 * config.prefix_share:.0f} % common to a group"
    )
    planner = (
        f"planner: presets by throughput and load interval in seconds; an engine starts in {config.startup_time:g} s"
        if uses_presets
        else "planner: not simulated"
        + (f", the load lasts less than {LOAD_S_MIN:g} s" if config.planner_presets else "")
    )
    engine = (
        f"engine: step times by a roofline model with the efficiencies of {estimate.source}; median errors on what was "
        f"left out of the fit: {estimate.text()}"
    )
    return [
        f"load: {load}",
        engine,
        "router and scheduler: the production router and the mocker's scheduler, in virtual time; prefix caching is on",
        planner,
        "KV transfer: one 400 Gbit/s adapter per GPU; failures are not simulated",
    ]


def launch_commands(config: RecommendConfig, candidate: CandidateDeployment) -> str:
    """Return a shell script that starts the deployment on one machine with enough GPUs."""
    frontend = _frontend(candidate)
    lines = ["#!/bin/sh", "# Starts the recommended deployment on one machine; stop it with Ctrl-C.", "set -eu"]
    lines += ["trap 'kill 0' EXIT INT TERM", "export DYN_DISCOVERY_BACKEND=file", f"{shlex.join(frontend)} &"]
    for one in workers(config, candidate):
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(one.gpus), **one.variables}
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        lines.append(f"{words} {shlex.join(one.command)} &")
    return "\n".join([*lines, "wait", ""])


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """One worker on a machine that it shares with others."""

    name: str
    gpus: list[str]
    command: list[str]
    variables: dict[str, str]


def workers(config: RecommendConfig, candidate: CandidateDeployment) -> list[WorkerLaunch]:
    """Return the workers with GPUs and ports of their own."""
    found: list[WorkerLaunch] = []
    first = 0
    for role, choice in roles(candidate):
        for number in range(choice.replicas):
            command, variables = worker_command(config, role, choice), {}
            if candidate.router.is_kv:
                command += kv_event_args(config.backend, role, KV_EVENTS_PORT + PORTS_PER_WORKER * len(found))
            if role is not None and config.backend == "vllm":
                variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(SIDE_CHANNEL_PORT + first)
            if role is not None and config.backend == "sglang":
                port = command.index("--disaggregation-bootstrap-port") + 1
                command[port] = str(BOOTSTRAP_PORT + len(found))
            gpus = [str(first + at) for at in range(choice.parallel.num_gpus)]
            found.append(WorkerLaunch(f"{role or 'worker'}-{number}", gpus, command, variables))
            first += choice.parallel.num_gpus
    return found


def roles(candidate: CandidateDeployment) -> list[tuple[str | None, EngineChoice]]:
    """Return the engines of each role; role None: aggregated."""
    decode, prefill = candidate.config.decode, candidate.config.prefill
    return [(None, decode)] if prefill is None else [("prefill", prefill), ("decode", decode)]


def worker_command(config: RecommendConfig, role: str | None, choice: EngineChoice) -> list[str]:
    """Return the command of one worker."""
    args = [*engine_args(config.backend, choice), *role_args(config.backend, role)]
    return ["python3", "-m", f"dynamo.{config.backend}", MODEL_FLAG[config.backend], str(config.model), *args]


def kv_event_args(backend: str, role: str | None, port: int) -> list[str]:
    """Return the arguments with which an engine publishes the KV events that the router follows."""
    if role == "decode":  # Prompts are routed to prefill engines.
        return []
    if backend == "trtllm":
        return [] if role == "prefill" else ["--publish-kv-events"]
    settings: dict[str, Any] = {"publisher": "zmq", "topic": "kv-events", "endpoint": f"tcp://*:{port}"}
    if backend == "sglang":
        return ["--kv-events-config", json.dumps(settings)]
    return ["--enable-prefix-caching", "--kv-events-config", json.dumps({**settings, "enable_kv_cache_events": True})]


def compose(config: RecommendConfig, candidate: CandidateDeployment) -> dict[str, Any]:
    """Return a compose file of the deployment, for one machine with enough GPUs."""
    image = backend_image(config.image, config.backend)
    common: dict[str, Any] = {
        "image": image,
        "network_mode": "host",
        "ipc": "host",
        "environment": {"DYN_DISCOVERY_BACKEND": "etcd"},
    }
    frontend = _frontend(candidate)
    services: dict[str, Any] = {
        "etcd": {
            "image": "quay.io/coreos/etcd:v3.5.21",
            "network_mode": "host",
            "command": [
                "etcd",
                "--advertise-client-urls",
                "http://127.0.0.1:2379",
                "--listen-client-urls",
                "http://0.0.0.0:2379",
            ],
        },
        "frontend": {**common, "command": frontend, "depends_on": ["etcd"]},
    }
    for one in workers(config, candidate):
        device = {"driver": "nvidia", "device_ids": one.gpus, "capabilities": ["gpu"]}
        services[one.name] = {
            **common,
            "environment": {**common["environment"], **one.variables},
            "command": one.command,
            "depends_on": ["etcd"],
            "deploy": {"resources": {"reservations": {"devices": [device]}}},
        }
    return {"services": services}


def _frontend(candidate: CandidateDeployment) -> list[str]:
    return ["python3", "-m", "dynamo.frontend", "--http-port", str(FRONTEND_PORT), *candidate.router.flags()]


def graph(spec: ProfileSpec, candidate: CandidateDeployment) -> list[KubeObject]:
    """Return the deployment as Kubernetes resources: the graph, after the configuration of its planner if it has one."""
    value = graph_of(spec, candidate.config, spec.backend, GRAPH_NAME)
    main = main_container(value["spec"]["components"][0])
    assert main is not None
    for name, setting in candidate.router.variables().items():
        set_env(main, name, setting)
    if candidate.router.is_kv:
        _publish_kv_events(value, spec.backend)
    if candidate.preset is None:
        return [value]
    planner = preset_config(candidate.preset, candidate.config, spec.latency, spec.total_gpus)
    planned = replace(spec, planner=replace(planner, backend=Backend(spec.backend)))
    if spec.backend == "vllm":
        enable_benchmarks(value)
    add_scaling_adapters(value, planner)
    settings = planner_config(planned, candidate.config, None)
    return [add_planner(value, planned, settings, lambda: GRAPH_NAME), value]


def _publish_kv_events(value: KubeObject, backend: str) -> None:
    for one in value["spec"]["components"]:
        main = main_container(one)
        if one["type"] in WORKERS and main is not None:
            role = None if one["type"] == "worker" else one["type"]
            main["args"] = [*main["args"], *kv_event_args(backend, role, KV_EVENTS_PORT)]


def as_json(one: SimulatedResult, estimate: EstimateError) -> dict[str, Any]:
    """Return an outcome as JSON data, with the relative errors of its latencies."""
    engines = {
        role or "aggregated": {
            "replicas": choice.replicas,
            "parallel": choice.parallel.label(),
            "gpus_per_engine": choice.parallel.num_gpus,
            "max_num_seqs": choice.batch,
            "max_num_batched_tokens": choice.max_tokens,
            "kv_cache_dtype": choice.kv_dtype,
        }
        for role, choice in roles(one.candidate)
    }
    return {
        "gpus": one.candidate.gpus,
        "mean_gpus": one.mean_gpus,
        "router_mode": one.candidate.router.mode,
        "router_settings": one.candidate.router.settings(),
        "planner_preset": one.candidate.preset,
        "engines": engines,
        "requests": one.requests,
        "met_share": one.met_share,
        "goodput_tok_s_per_gpu": one.goodput_per_gpu,
        "output_tok_s": one.output_tok_s,
        "mean_ttft_ms": one.ttft_ms,
        "p95_ttft_ms": one.p95_ttft_ms,
        "mean_itl_ms": one.itl_ms,
        "mean_e2e_ms": one.e2e_ms,
        "reused_share": one.reused_share,
        "error": {"ttft": estimate.ttft, "itl": estimate.itl, "source": estimate.source},
    }
