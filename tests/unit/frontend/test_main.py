"""Import budget of the frontend: what its first answer does not need is not loaded at its start."""

import subprocess
import sys

DEFERRED = (
    "dynamo.parsers.registry", "dynamo.kv_router.router", "dynamo.routing.kv_push_router", "websockets", "difflib", "tomllib", "zmq", "tokenizers", "fastokens", "numpy", "transformers", "grpc", "kubernetes_asyncio",
    "nats", "opentelemetry", "dynamo.grpc", "dynamo.cpu", "dynamo.text.preprocessor", "dynamo.text.tokenizer.tokenizer", "jinja2",
    "click", "multiprocessing", "statistics", "dynamo.core.supervisor", "dynamo.protocols.planner", "dynamo.http.client", "dynamo.kv_router.decision",
    "dynamo.mocker", "dynamo.planner", "dynamo.profiler", "dynamo.operator", "blake3", "importlib.resources", "zipfile",
    "dynamo.api.batches.runner", "dynamo.api.batches.slots", "dynamo.api.batches.store", "dynamo.serving.request_trace.trace", "gzip", "dynamo.text.guided", "dynamo.api.responses.directory_store",
)  # fmt: skip
MODULES_MAX = 522
"""Modules after the import, those of Python's own start included; 517 when this was written."""


def test_frontend_imports_only_what_the_first_answer_needs() -> None:
    code = f"""
import sys
from dynamo.core.deferred_modules import deferred
from dynamo.core.interpreter import RARELY_USED
with deferred(RARELY_USED):  # As `run_command` does.
    import dynamo.frontend.main
print([n for n in ({DEFERRED!r} + RARELY_USED) if n in sys.modules], len(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, _, count = done.stdout.strip().rpartition(" ")
    assert names == "[]"
    assert int(count) <= MODULES_MAX


DATACLASSES_MAX = 16
"""Dataclasses made by the import: the configurations, whose fields `option()` makes, and those of libraries.

Each takes about a millisecond, twenty times the time of a `msgspec.Struct`.
"""


def test_frontend_import_makes_few_dataclasses() -> None:
    code = """
import dataclasses
made, make = [], dataclasses._process_class
def counted(cls, *args, **kwargs):
    made.append(f"{cls.__module__}.{cls.__qualname__}")
    return make(cls, *args, **kwargs)
dataclasses._process_class = counted
import dynamo.frontend.main
print(*made)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    made = done.stdout.split()
    assert "dynamo.frontend.config.FrontendConfig" in made, "the counter counts nothing"
    assert len(made) <= DATACLASSES_MAX, made
