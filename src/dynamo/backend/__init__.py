"""Backend: the engine protocol and the worker lifecycle that all engine adapters share.

Must not depend on a particular engine.

The names for engine authors are imported on first use; `dynamo.backend.sample` is an example.
"""

from dynamo.core.lazy import lazy_names

_PUBLIC = {
    "EngineConfig": "dynamo.backend.engine",
    "EngineHost": "dynamo.backend.engine",
    "LLMEngine": "dynamo.backend.engine",
    "WorkerOptions": "dynamo.backend.config",
    "run": "dynamo.backend.command",
    "run_worker": "dynamo.backend.process",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
