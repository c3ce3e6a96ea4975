"""Mocker: an inference engine without a model, with simulated scheduling, caching and step times and random tokens.

Contains the simulated scheduler and cache (`simulation`, pure) and the asyncio shell that runs it in real time behind a
worker. Does not depend on request transport or on other engines.

Names are imported lazily, on first access.
"""

from dynamo import __version__
from dynamo.core.lazy import lazy_names

_PUBLIC = {
    "ReasoningConfig": "dynamo.llm.perf_config",
    "run_mocker_trace_replay": "dynamo.replay.bindings",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
__all__ += ["__version__"]
