"""Output of a recommendation: table, front, assumptions, launch commands, compose file and graph. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.profiler.graph.components import BOOTSTRAP_PORT, MODEL_FLAG, engine_args, graph_of, role_args
from dynamo.profiler.graph.features import enable_kv_router
from dynamo.profiler.graph.images import backend_image
from dynamo.profiler.perf.efficiencies import BackendEfficiency
from dynamo.profiler.recommend.config import RecommendConfig
from dynamo.profiler.recommend.simulation import CandidateDeployment, SimulatedResult
from dynamo.profiler.search import EngineChoice
from dynamo.profiler.spec import ProfileSpec
from dynamo.protocols.kubernetes.common import KubeObject

FRONTEND_PORT = 8000
ROWS_MAX = 12
GRAPH_NAME = "recommended"
SIDE_CHANNEL_PORT = 5600
"""First port at which vLLM workers offer their KV cache."""


def table(results: Sequence[SimulatedResult], on_front: Sequence[SimulatedResult], share: float) -> str:
    """Return the best results, fewest GPUs first; a star marks the Pareto front."""
    lines = [
        f"  {'GPUs':>4} {'met':>6} {'tok/s/GPU':>9} {'TTFT ms':>8} {'p95':>8} {'ITL ms':>7} {'reuse':>6}  deployment"
    ]
    ordered = sorted(results, key=lambda one: (one.met_share < share, one.candidate.gpus, -one.goodput))
    return "\n".join([*lines, *(_table_row(one, on_front) for one in ordered[:ROWS_MAX])])


def _table_row(one: SimulatedResult, on_front: Sequence[SimulatedResult]) -> str:
    return (
        f"{'*' if one in on_front else ' '} {one.candidate.gpus:>4} {100 * one.met_share:>5.1f}% {one.goodput_per_gpu:>9.0f} "
        f"{one.ttft_ms:>8.0f} {one.p95_ttft_ms:>8.0f} {one.itl_ms:>7.1f} {100 * one.reused_share:>5.0f}%  "
        f"{one.candidate.label()}"
    )


def assumptions(config: RecommendConfig, accuracy: BackendEfficiency, *, is_corrected: bool) -> list[str]:
    """Return what the recommendation rests on, one line each."""
    load = (
        f"the first {config.requests} requests of {config.trace}, at their recorded times and with their common prefixes"
        if config.trace is not None
        else f"{config.requests} generated requests at random times, {config.request_rate:g} per second, "
        f"{config.isl} prompt and {config.osl} answer tokens, {100 * config.prefix_share:.0f} % common to a group"
    )
    corrected = ", corrected by the given points" if is_corrected else ""
    engine = (
        f"engine: step times by a roofline model with the efficiencies of {accuracy.source}{corrected}; on models and GPUs "
        f"that were left out of the fit its median error is {100 * accuracy.tpot_error:.0f} % of the ITL and "
        f"{100 * accuracy.ttft_error:.0f} % of the TTFT"
    )
    return [
        f"load: {load}",
        engine,
        "router and scheduler: the production router and the mocker's scheduler, in virtual time; prefix caching is on",
        "KV transfer: one 400 Gbit/s adapter per GPU; failures, autoscaling and start-up times are not simulated",
    ]


def launch_commands(config: RecommendConfig, candidate: CandidateDeployment) -> str:
    """Return a shell script that starts the deployment on one machine with enough GPUs."""
    router = ["--router-mode", "kv" if candidate.router_mode == "kv_router" else "round-robin"]
    frontend = ["python3", "-m", "dynamo.frontend", "--http-port", str(FRONTEND_PORT), *router]
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


def compose(config: RecommendConfig, candidate: CandidateDeployment) -> dict[str, Any]:
    """Return a compose file of the deployment, for one machine with enough GPUs."""
    image = backend_image(config.image, config.backend)
    common: dict[str, Any] = {
        "image": image,
        "network_mode": "host",
        "ipc": "host",
        "environment": {"DYN_DISCOVERY_BACKEND": "etcd"},
    }
    mode = "kv" if candidate.router_mode == "kv_router" else "round-robin"
    frontend = ["python3", "-m", "dynamo.frontend", "--http-port", str(FRONTEND_PORT), "--router-mode", mode]
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


def graph(spec: ProfileSpec, candidate: CandidateDeployment) -> KubeObject:
    """Return the deployment as a Kubernetes resource."""
    value = graph_of(spec, candidate.config, spec.backend, GRAPH_NAME)
    if candidate.router_mode == "kv_router":
        enable_kv_router(value)
    return value


def as_json(one: SimulatedResult) -> dict[str, Any]:
    """Return an outcome as JSON data."""
    engines = {
        role or "aggregated": {
            "replicas": choice.replicas,
            "parallel": choice.parallel.label(),
            "gpus_per_engine": choice.parallel.num_gpus,
            "max_num_seqs": choice.batch,
            "max_num_batched_tokens": choice.max_tokens,
        }
        for role, choice in roles(one.candidate)
    }
    return {
        "gpus": one.candidate.gpus,
        "router_mode": one.candidate.router_mode,
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
    }
