"""Command line of the mocker as a namespace with upstream's names, for programs that start workers themselves."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo.common.configuration.groups.router_args import parse_worker_router_config
from dynamo.common.configuration.utils import Deprecated
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.core.errors import ConfigError
from dynamo.core.unsupported_flags import load
from dynamo.mocker.config import UNSUPPORTED_FLAGS, MockerConfig

REMOVED_IN = "Dynamo 1.8.0 (two releases after 1.6.0)"
PORTS = ("bootstrap_ports", "zmq_kv_events_ports", "zmq_replay_ports")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings of a command line, by default this process's. Exit with status 2 for an invalid one."""
    words = list(sys.argv[1:] if argv is None else argv)
    warn_of_deprecated(words)
    try:
        config = load(MockerConfig, words, UNSUPPORTED_FLAGS, prog="python -m dynamo.mocker")
        advertised = parse_worker_router_config(words)[0]
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    return argparse.Namespace(**(upstream_names(config) | {"router_advertisement": advertised}))


def warn_of_deprecated(words: Sequence[str]) -> None:
    """Emit a FutureWarning for each spelling that a later release removes."""
    flags = [word.partition("=")[0] for word in words]
    values = [word.partition("=")[2] or following for word, following in zip(words, [*words, ""][1:], strict=True)]
    if ("--sglang-schedule-policy", "fcfs") in zip(flags, values, strict=True):
        Deprecated("--sglang-schedule-policy fifo", REMOVED_IN).warn("--sglang-schedule-policy fcfs")
    if "--sglang-page-size" in flags:
        Deprecated("--block-size", REMOVED_IN).warn("--sglang-page-size")


def upstream_names(config: MockerConfig) -> dict[str, Any]:
    """Return the settings under the names of upstream's namespace."""
    mode = config.disaggregation_mode or "agg"
    policy = config.sglang_schedule_policy
    profile, extra = config.planner_profile_data, config.extra_engine_args
    component = "prefill" if mode == "prefill" else "backend"
    return asdict(config) | {
        "block_size": config.block_tokens,
        "disaggregation_mode": mode,
        "is_prefill_worker": mode == "prefill",
        "is_decode_worker": mode == "decode",
        "dp_size": config.data_parallel_size,
        "sglang_schedule_policy": "fifo" if policy == "fcfs" else policy,
        "planner_profile_data": None if profile is None else Path(profile),
        "extra_engine_args": None if extra is None else Path(extra),
        "endpoint": config.endpoint or f"dyn://{get_worker_namespace()}.{component}.generate",
        **{f"{name}_list": getattr(config, name) for name in PORTS},
    }
