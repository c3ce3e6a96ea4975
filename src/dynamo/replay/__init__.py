"""Replay: the production router with simulated engines in virtual time: a cluster of any size on one core.

Contains reading and generating loads, the event loop of virtual time, and the reports. Does not depend on sockets,
processes or wall time (except to show progress). All randomness comes from one seed: the same command gives the same
report.

Names are imported lazily, on first access.
"""

from dynamo.core.lazy import lazy_names

_PUBLIC = {
    "PlannerReplayDetails": "dynamo.replay.report",
    "ReplayReport": "dynamo.replay.report",
    "ReplayTelemetryDetails": "dynamo.replay.report",
    "TelemetryOptions": "dynamo.replay.api",
    "run_synthetic_trace_replay": "dynamo.replay.api",
    "run_trace_replay": "dynamo.replay.api",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
