"""Routers: the router policies and queue policies of a search, as settings of the simulator, flags and variables. Pure.

All of them exist in the released frontend. `prefill_load_scale` above 1 spreads prompts over workers at the cost of cached
prefixes. A queue holds requests while every worker has more prompt tokens to compute than `queue_threshold` batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

FLAGS = {
    "prefill_load_scale": ("--router-prefill-load-scale", "DYN_ROUTER_PREFILL_LOAD_SCALE"),
    "queue_threshold": ("--router-queue-threshold", "DYN_ROUTER_QUEUE_THRESHOLD"),
    "queue_policy": ("--router-queue-policy", "DYN_ROUTER_QUEUE_POLICY"),
}
"""Flag and variable of each setting."""
MODE_FLAGS = {"kv_router": "kv", "round_robin": "round-robin", "least_loaded": "least-loaded"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterChoice:
    """Router of a deployment."""

    mode: str
    """Router mode, as in `dynamo replay --router-mode`."""
    prefill_load_scale: float = 1.0
    """Cost of a block to compute, relative to an occupied block."""
    queue_threshold: float | None = None
    """None: requests are routed as they arrive."""
    queue_policy: str | None = None

    @property
    def is_kv(self) -> bool:
        """Return whether the router uses the KV events of the workers."""
        return self.mode == "kv_router"

    def label(self) -> str:
        """Return a short description that differs for all choices."""
        parts = [self.mode]
        if self.prefill_load_scale != 1:
            parts.append(f"prefill load {self.prefill_load_scale:g}")
        if self.queue_policy is not None:
            parts.append(f"queue {self.queue_policy}")
        return " ".join(parts)

    def settings(self) -> dict[str, Any]:
        """Return the settings that are not the default."""
        found: dict[str, Any] = {} if self.prefill_load_scale == 1 else {"prefill_load_scale": self.prefill_load_scale}
        if self.queue_policy is not None:
            found |= {"queue_threshold": self.queue_threshold, "queue_policy": self.queue_policy}
        return found

    def flags(self) -> list[str]:
        """Return the flags of the frontend."""
        found = ["--router-mode", MODE_FLAGS[self.mode]]
        for name, value in self.settings().items():
            found += [FLAGS[name][0], f"{value:g}" if isinstance(value, float) else str(value)]
        return found

    def variables(self) -> Mapping[str, str]:
        """Return the variables of the frontend."""
        words = iter(self.flags())
        by_flag = dict(zip(words, words, strict=True))
        variables = dict(FLAGS.values()) | {"--router-mode": "DYN_ROUTER_MODE"}
        return {variables[flag]: value for flag, value in by_flag.items()}


KV_ROUTER = RouterChoice(mode="kv_router")
POLICIES = (
    KV_ROUTER,
    replace(KV_ROUTER, prefill_load_scale=4.0),
    RouterChoice(mode="round_robin"),
    RouterChoice(mode="least_loaded"),
)
QUEUES = tuple(replace(KV_ROUTER, queue_threshold=1.0, queue_policy=policy) for policy in ("fcfs", "wspt"))
ROUTERS = (*POLICIES, *QUEUES)
