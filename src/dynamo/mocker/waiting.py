"""Unsupported flags: flags of upstream's mocker that are recognized but not implemented yet. Pure."""

from dynamo.backend import waiting
from dynamo.core.waiting import Waiting
from dynamo.routing.unsupported_flags import ADVERTISED, AIS

NEEDS_AIS = (
    "AISimulate's measured tables (NVIDIA's package aisimulate) are not supported; pass measurements with "
    "--planner-profile-data"
)
WITH_AIS = "requires --ais-perf-model, which is not supported; set the number of blocks with --num-gpu-blocks-override"


def _fraction(flag: str, default: str) -> Waiting:
    return Waiting(flag, None, default, hint=WITH_AIS)


WAITING: tuple[Waiting, ...] = (
    *waiting.WAITING,
    _fraction("--gpu-memory-utilization", "0.9"),
    _fraction("--mem-fraction-static", "0.88"),
    _fraction("--free-gpu-memory-fraction", "0.9"),
    Waiting("--ais-perf-model", None, default=False, aliases=("--aic-perf-model",), hint=NEEDS_AIS),
    *(Waiting(one.flag, None, one.default, one.aliases, NEEDS_AIS) for one in AIS),
    *(Waiting(one.flag, None, one.default, one.aliases) for one in ADVERTISED),
)
"""Upstream's flags that this mocker rejects; the routing variables of a frontend on the same host are not checked."""
