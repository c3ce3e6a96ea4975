"""Engine settings: upstream's canonical form (`dynamo.mocker.normalized`) of a command line, and the facts of a card.

The functions of upstream's `dynamo.mocker.config`, where programs import them.
"""

import argparse
import copy
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo.common.utils.topology import apply_topology_config
from dynamo.core.config import environ
from dynamo.core.errors import InvalidArgument
from dynamo.llm import ModelRuntimeConfig
from dynamo.mocker.normalized import normalize_mocker_config

RANK = (
    "num_gpu_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching",
    "enable_chunked_prefill", "speedup_ratio", "decode_speedup_ratio", "kv_transfer_bandwidth", "kv_transfer_timing_mode",
    "preemption_mode",
)  # fmt: skip
"""Settings of a rank whose flags have the same name."""
RANK_OF_FLAG = {
    "ais_nextn": "aic_nextn",
    "ais_nextn_accept_rates": "aic_nextn_accept_rates",
    "ais_mtp_seed": "aic_mtp_seed",
    "kv_bytes_per_token": "kv_transfer_bytes_per_token",
}
"""Settings of a rank by the flag, where they differ."""
SCHEDULERS = {
    "sglang": (
        "schedule_policy", "max_prefill_tokens", "chunked_prefill_size", "clip_max_new_tokens", "schedule_conservativeness",
    ),
    "trtllm": ("capacity_scheduler_policy",),
}  # fmt: skip
PROCESS = ("dp_size", "startup_time", "gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction")
PORTS = ("bootstrap_port", "zmq_kv_events_port", "zmq_replay_port")
WORKER_TYPES = {"agg": "aggregated", "prefill": "prefill", "decode": "decode", None: "aggregated"}


def build_mocker_engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a command line (`dynamo.mocker.args.parse_args`). Raise `InvalidArgument`."""
    rank = _given(args, {name: name for name in RANK} | RANK_OF_FLAG)
    rank |= {"backend": args.engine_type, "worker_type": WORKER_TYPES[args.disaggregation_mode]}
    for engine, names in SCHEDULERS.items():
        if table := _given(args, {f"{engine}_{name}": name for name in names}):
            rank[engine] = table
    if (profile := getattr(args, "planner_profile_data", None)) is not None:
        config = {"path": str(profile)}
        rank["timing_model"] = {"type": "external", "provider": "dynamo_profile", "config": config}
    if (host := _host_offload(args)) is not None:
        rank |= {"native_host_offload": host, "kv_cache_bytes_per_token": getattr(args, "kv_bytes_per_token", None)}
    worker: dict[str, Any] = {"enable_local_indexer": True}
    if getattr(args, "reasoning", None):
        worker["reasoning"] = json.loads(args.reasoning)
    if getattr(args, "response_replay_trace_path", None):
        worker["response_replay_trace_path"] = str(args.response_replay_trace_path)
    process = _given(args, {name: name for name in PROCESS})
    return normalize_mocker_config({**process, "engine": rank, "dynamo": worker})


def load_mocker_engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of `--extra-engine-args`, or of the other flags. Raise `InvalidArgument`, `OSError`."""
    if args.extra_engine_args:
        return normalize_mocker_config(Path(args.extra_engine_args).read_text(encoding="utf-8"))
    return build_mocker_engine_args(args)


def apply_worker_engine_args_overrides(
    engine_args: Mapping[str, Any],
    *,
    kv_bytes_per_token: int | None = None,
    bootstrap_port: int | None = None,
    zmq_kv_events_port: int | None = None,
    zmq_replay_port: int | None = None,
    ais_mtp_seed: int | None = None,
) -> dict[str, Any]:
    """Return a copy of the settings with those of one worker. Raise `InvalidArgument`."""
    found = copy.deepcopy(dict(engine_args))
    ports = zip(PORTS, (bootstrap_port, zmq_kv_events_port, zmq_replay_port), strict=True)
    found.setdefault("dynamo", {}).update({name: port for name, port in ports if port is not None})
    rank = {"kv_transfer_bytes_per_token": kv_bytes_per_token, "aic_mtp_seed": ais_mtp_seed}
    found["engine"].update({name: value for name, value in rank.items() if value is not None})
    return normalize_mocker_config(found)


def build_runtime_config(engine_args: Mapping[str, Any]) -> tuple[int, ModelRuntimeConfig]:
    """Return the block size, and the facts that the worker's card states about the engine."""
    rank, worker = engine_args["engine"], engine_args["dynamo"]
    is_decode = rank["worker_type"] == "decode"
    facts = ModelRuntimeConfig()
    facts.context_length = rank["max_model_len"] or 0
    facts.total_kv_blocks = rank["num_gpu_blocks"]
    facts.max_num_seqs = rank["max_num_seqs"]
    facts.max_num_batched_tokens = rank["max_num_batched_tokens"]
    facts.enable_local_indexer = worker["enable_local_indexer"] and not is_decode
    facts.kv_event_publishing_enabled = rank["enable_prefix_caching"] and not is_decode
    facts.data_parallel_size = engine_args["dp_size"]
    facts.set_engine_specific("output_replay_consumer", "true")
    if rank["worker_type"] == "prefill" and worker["bootstrap_port"] is not None:
        host = environ().get("DYN_HTTP_RPC_HOST") or socket.gethostbyname(socket.gethostname())
        facts.set_disaggregated_endpoint(bootstrap_host=host, bootstrap_port=worker["bootstrap_port"])
    apply_topology_config(facts)
    return rank["block_size"], facts


def _given(args: argparse.Namespace, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of the flags that are set; `names` maps flags to settings."""
    values = {name: getattr(args, flag, None) for flag, name in names.items()}
    return {name: value for name, value in values.items() if value is not None}


def _host_offload(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the settings of the cache in host memory. Raise `InvalidArgument` for its flags without its size."""
    speeds = _given(args, {f"host_offload_{way}_bandwidth_gbps": f"{way}_bandwidth_gbps" for way in ("d2h", "h2d")})
    blocks = getattr(args, "num_host_blocks", None)
    if blocks is not None:
        return {"num_host_blocks": blocks, **speeds}
    if speeds:
        raise InvalidArgument("--host-offload-*-bandwidth-gbps: expected --num-host-blocks as well")
    return None
