"""SLA planner: choose the number of workers from traffic and load, and explain every decision.

`config` reads and checks settings; `core` decides and is pure: observations and time are arguments, decisions with their
reasons are results. Connectors, observation and the tick loop act on them.

Names are imported lazily, on first access.
"""

from dynamo.core.lazy import lazy_names

_PUBLIC = {
    "SLAPlannerDefaults": "dynamo.planner.config.defaults",
    "SubComponentType": "dynamo.planner.config.defaults",
    "TargetReplica": "dynamo.planner.config.defaults",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
