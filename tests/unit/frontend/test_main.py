"""Import budget of the frontend: what its first answer does not need is not loaded at its start."""

import subprocess
import sys

DEFERRED = (
    "dynamo.parsers.registry", "dynamo.kv_router.router", "dynamo.routing.kv_push_router", "websockets", "difflib", "tomllib", "zmq", "tokenizers", "fastokens", "numpy", "transformers", "grpc", "kubernetes_asyncio",
    "nats", "opentelemetry", "dynamo.grpc", "dynamo.cpu", "dynamo.text.preprocessor", "dynamo.text.tokenizer.tokenizer", "jinja2",
    "click", "multiprocessing", "statistics", "dynamo.core.supervisor", "dynamo.protocols.planner", "dynamo.http.client", "dynamo.kv_router.decision",
    "dynamo.mocker", "dynamo.planner", "dynamo.profiler", "dynamo.operator",
)  # fmt: skip
MODULES_MAX = 560
"""Modules after the import, those of Python's own start included; 552 when this was written."""


def test_frontend_imports_only_what_the_first_answer_needs() -> None:
    code = f"import sys, dynamo.frontend.main; print([n for n in {DEFERRED!r} if n in sys.modules], len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, _, count = done.stdout.strip().rpartition(" ")
    assert names == "[]"
    assert int(count) <= MODULES_MAX
