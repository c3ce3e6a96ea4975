"""DisaggregationOptions: the flags of disaggregated routing to prefill and decode workers."""

from dataclasses import dataclass

import msgspec

from dynamo.core.config import option
from dynamo.core.errors import ConfigError
from dynamo.kv_router.config import RouterConfig
from dynamo.routing.policy_file import TYPES, RouterPolicy
from dynamo.routing.prefill_plan import CONFIG_FLAG, FLAG, Conditional


@dataclass(frozen=True, kw_only=True)  # No slots: it is mixed into the options of the routers.
class DisaggregationOptions:
    """Routing to prefill and decode workers."""

    enforce_disagg: bool = option(
        False,
        "--enforce-disagg",
        "DYN_ENFORCE_DISAGG",
        "Fail requests while no prefill worker is available, instead of computing their prompts on decode workers",
    )
    conditional_disagg: bool = option(
        False,
        "--router-conditional-disagg",
        "DYN_ROUTER_CONDITIONAL_DISAGG",
        "Compute a prompt on its decode worker if that is faster; requires kv mode with KV events",
    )
    conditional_disagg_config: str | None = option(
        None,
        "--router-conditional-disagg-config",
        "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG",
        "JSON object with the conditions: policy (isl_bounding, prefill_load, isl_or_load), eff_isl_threshold, "
        "eff_isl_ratio_threshold, prefill_busy_threshold, decode_busy_threshold",
    )
    prefill_policy: str | None = option(
        None,
        "--router-prefill-policy",
        "DYN_ROUTER_PREFILL_POLICY",
        "Routing policy of prefill workers: default, balanced, or an instance of --router-policy-config",
    )
    decode_policy: str | None = option(
        None, "--router-decode-policy", "DYN_ROUTER_DECODE_POLICY", "Routing policy of decode workers; same values"
    )

    def conditional(self, queue_threshold: float | None) -> Conditional | None:
        """Return the conditions of prefill on decode workers; None if disabled. Raises `ConfigError`."""
        if not self.conditional_disagg:
            if self.conditional_disagg_config is not None:
                raise ConfigError(f"{CONFIG_FLAG} requires {FLAG}")
            return None
        return Conditional.read(self.conditional_disagg_config, queue_threshold)

    def policy_of(self, worker_type: str) -> str | None:
        """Return the policy that a flag names for workers of that type."""
        return {"prefill": self.prefill_policy, "decode": self.decode_policy}.get(worker_type)

    def check_disaggregation(self, router_mode: str, config: RouterConfig, policy: RouterPolicy | None) -> None:
        """Raise `ConfigError` for conflicting flags, or for a policy missing in the file."""
        self.conditional(config.queue_threshold)
        if self.conditional_disagg and router_mode != "kv":
            raise ConfigError(f"{FLAG} requires --router-mode kv")
        if self.conditional_disagg and not config.use_kv_events:
            raise ConfigError(f"{FLAG} requires --router-kv-events")
        for worker_type in ("prefill", "decode"):
            name = self.policy_of(worker_type)
            if name is not None and router_mode != "kv":
                raise ConfigError(f"--router-{worker_type}-policy requires --router-mode kv")
            if name is not None and policy is None and name not in TYPES:
                raise ConfigError(
                    f"--router-{worker_type}-policy {name}: without --router-policy-config must be one of "
                    + ", ".join(TYPES)
                )
            config_of_stage(config, worker_type, policy, self)


def config_of_stage(
    config: RouterConfig, worker_type: str, policy: RouterPolicy | None, options: DisaggregationOptions
) -> RouterConfig:
    """Return the configuration for workers of one type. Raises `ConfigError` for a policy missing in the file."""
    name = options.policy_of(worker_type)
    stage = worker_type if worker_type in ("prefill", "decode", "encode") else "aggregated"
    if policy is not None:
        config = policy.applied(config, stage, name)
    elif name is not None:
        config = msgspec.structs.replace(config, policy="balanced" if TYPES[name] == "balanced" else "dynamo")
    if worker_type == "prefill":  # Blocks leave after the transfer: only active prefills count.
        return msgspec.structs.replace(config, track_active_blocks=False, track_output_blocks=False)
    if worker_type == "decode" and not options.conditional_disagg:  # Chosen by load alone: cache state is not needed.
        return msgspec.structs.replace(config, use_kv_events=False, use_remote_indexer=False, durable_kv_events=False)
    return config
