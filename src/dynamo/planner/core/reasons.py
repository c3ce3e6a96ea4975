"""Reasons of decisions. The values are states of Prometheus enums: members are only ever appended."""

import enum


class LoadReason(enum.StrEnum):
    """Reason of a load (reactive) decision."""

    UNSET = "unset"
    DISABLED = "disabled"
    NO_FPM_DATA = "no_fpm_data"
    SCALING_IN_PROGRESS = "scaling_in_progress"
    WORKER_COUNT_MISMATCH = "worker_count_mismatch"
    INSUFFICIENT_DATA = "insufficient_data"
    NO_CHANGE = "no_change"
    SCALE_UP = "scale_up"
    SCALE_DOWN = "scale_down"
    SCALE_DOWN_CAPPED_BY_THROUGHPUT = "scale_down_capped_by_throughput"
    SCALE_DOWN_REFUSED_CONSOLIDATION = "scale_down_refused_consolidation"
    OVERRIDE_BY_USER_PLUGIN = "override_by_user_plugin"
    RECONCILE_CLAMPED_TO_FLOOR = "reconcile_clamped_to_floor"
    RECONCILE_CLAMPED_TO_CEILING = "reconcile_clamped_to_ceiling"
    HELD_OVER = "held_over"
    REJECTED_BY_PLUGIN = "rejected_by_plugin"
    GPU_BUDGET_GUARD_HOLD = "gpu_budget_guard_hold"
    GPU_BUDGET_RECONCILE = "gpu_budget_reconcile"
    GPU_BUDGET_BELOW_MINIMUM = "gpu_budget_below_minimum"


class ThroughputReason(enum.StrEnum):
    """Reason of a throughput (predictive) decision."""

    UNSET = "unset"
    DISABLED = "disabled"
    NO_TRAFFIC_DATA = "no_traffic_data"
    PREDICT_FAILED = "predict_failed"
    MODEL_NOT_READY = "model_not_ready"
    SET_LOWER_BOUND = "set_lower_bound"
    SCALE = "scale"
    OVERRIDE_BY_USER_PLUGIN = "override_by_user_plugin"
    HELD_OVER = "held_over"
    CIRCUIT_OPEN = "circuit_open"
    REJECTED_BY_PLUGIN = "rejected_by_plugin"
    GPU_BUDGET_GUARD_HOLD = "gpu_budget_guard_hold"
    NO_CHANGE = "no_change"
    GPU_BUDGET_RECONCILE = "gpu_budget_reconcile"
    PARTNER_NOT_READY = "partner_not_ready"
    """Of one role only: the other role's model is not ready."""
    GPU_BUDGET_BELOW_MINIMUM = "gpu_budget_below_minimum"


class LimitReason(enum.StrEnum):
    """Reason why the result of the pipeline was reduced or held."""

    ROLLOUT_IN_PROGRESS = "rollout_in_progress"
    ROLLOUT_FAILED = "rollout_failed"
    GPU_BUDGET_BELOW_MINIMUM = "gpu_budget_below_minimum"
    POWER_BUDGET_BELOW_MINIMUM = "power_budget_below_minimum"
    POWER_UNKNOWN = "power_unknown"
    """The watts of a replica are unknown: no role grows."""
    POWER_REBALANCE_STAGED = "power_rebalance_staged"
    POWER_BUDGET_CLAMPED = "power_budget_clamped"
    POWER_BUDGET_SCALE_UP_SUPPRESSED = "power_budget_scale_up_suppressed"


class ExecuteAction(enum.StrEnum):
    """What the shell has to do with the result of a tick."""

    APPLY = "apply"
    SKIP_NO_TARGETS = "skip_no_targets"
    SKIP_SHORT_CIRCUIT = "skip_short_circuit"
    SKIP_TICK_TIMEOUT = "skip_tick_timeout"
