"""Waiting flags: those of upstream's mocker that this one knows and does not honour yet (serving-plane.md §5.11). Pure."""

from dynamo.backend import waiting
from dynamo.core.waiting import Waiting
from dynamo.llm.router_waiting import ADVERTISED, AIS


def _given(flag: str, default: str | bool = "") -> Waiting:
    return Waiting(flag, None, default)


WAITING: tuple[Waiting, ...] = (
    *waiting.WAITING,
    _given("--gpu-memory-utilization", "0.9"),
    _given("--mem-fraction-static", "0.88"),
    _given("--free-gpu-memory-fraction", "0.9"),
    Waiting("--ais-perf-model", None, default=False, aliases=("--aic-perf-model",)),
    *(Waiting(one.flag, None, one.default, one.aliases) for one in (*ADVERTISED, *AIS)),
)
"""Its variables of routing are the frontend's too, which may run beside it: they are not refused here."""
