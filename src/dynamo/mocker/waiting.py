"""Waiting flags: those of upstream's mocker that this one knows and does not honour yet (serving-plane.md §5.11). Pure."""

from dynamo.backend import waiting
from dynamo.core.waiting import Waiting
from dynamo.routing.unsupported_flags import ADVERTISED, AIS

NEEDS_AIS = (
    "AISimulate's measured tables (NVIDIA's package aisimulate) are not used; say what was measured by "
    "--planner-profile-data"
)
WITH_AIS = "it counts with --ais-perf-model alone, which is not here; say the blocks by --num-gpu-blocks-override"


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
"""Its variables of routing are the frontend's too, which may run beside it: they are not refused here."""
