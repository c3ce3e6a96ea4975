"""Unified backend SDK: upstream's API with which engines in Python are written and served.

An engine is a subclass of `LLMEngine` (tokens) or `RawEngine` (media); `Worker` serves it with the worker of
`dynamo.backend`. Names, arguments and exceptions are upstream's.
"""

from dynamo.core.lazy import lazy_names

_PUBLIC = {
    "BaseEngine": "dynamo.common.backend.engine",
    "DiffusionEngine": "dynamo.common.backend.engine",
    "EngineConfig": "dynamo.common.backend.engine",
    "GenerateChunk": "dynamo.common.backend.engine",
    "GenerateRequest": "dynamo.common.backend.engine",
    "LLMEngine": "dynamo.common.backend.engine",
    "LlmRegistration": "dynamo.common.backend.engine",
    "RawEngine": "dynamo.common.backend.engine",
    "RawRequest": "dynamo.common.backend.engine",
    "RawResponseChunk": "dynamo.common.backend.engine",
    "Worker": "dynamo.common.backend.worker",
    "WorkerConfig": "dynamo.common.backend.worker",
}

__all__, _get, __dir__ = lazy_names(__name__, _PUBLIC)
__all__ += ["telemetry"]


def __getattr__(name: str) -> object:
    if name == "telemetry":
        from importlib import import_module

        return import_module(f"{__name__}.telemetry")
    return _get(name)
