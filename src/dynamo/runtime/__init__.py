"""Distributed runtime: service discovery, request plane and event plane between processes.

This package contains instances, endpoints, clients and connections. It does not depend on models, tokenizers or the
HTTP interface of the OpenAI API. A payload is opaque bytes; only the fast path of response streams handles token ids.

The names of the public Python API are imported lazily, on first access.
"""

from dynamo.core.lazy import lazy_names

_PUBLIC = {
    "Annotated": "dynamo.runtime.streams",
    "Client": "dynamo.runtime.client",
    "Component": "dynamo.runtime.component",
    "Context": "dynamo.runtime.context",
    "DistributedRuntime": "dynamo.runtime.distributed",
    "Endpoint": "dynamo.runtime.component",
    "Namespace": "dynamo.runtime.component",
    "RequestStream": "dynamo.runtime.streams",
    "ResponseStream": "dynamo.runtime.streams",
    "UnaryClient": "dynamo.runtime.unary",
    "dynamo_endpoint": "dynamo.runtime.decorators",
    "dynamo_worker": "dynamo.runtime.decorators",
    "serve_unary_endpoint": "dynamo.runtime.unary",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _PUBLIC, {"PyAsyncRequestStream": "RequestStream"})
