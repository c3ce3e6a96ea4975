"""Relayed routes: shared parts of routes whose requests are forwarded to a worker unchanged."""

from typing import NoReturn

from dynamo.core.errors import NotFound
from dynamo.http.routes.table import ErrorBody
from dynamo.serving.endpoints import Surface
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.models import ModelAccess, Models
from dynamo.serving.served_model import ServedModel


def never(*_: object) -> NoReturn:
    """Placeholder for the response factories of a surface: a relayed response has no chunks."""
    raise AssertionError("a relayed response has no chunks")


def relayed(endpoint: str, model_type: str, error_body: ErrorBody = ErrorAnswer.body) -> Surface:
    """Return the surface of a relayed endpoint: its label, the type of its models, and the form of its errors."""
    return Surface(endpoint, model_type, response_id=str, chunks=never, body=never, error_body=error_body)


def text_model(models: Models, name: str | None, model_type: str, access: ModelAccess | None) -> ServedModel:
    """Return the set that serves text requests of that type. Raise the errors of `Models.find`."""
    model = models.find(name or "", model_type, access)
    if not model.takes_text:
        raise NotFound(
            f"Model not found: {name!r} takes tokens, and {model_type.lower()} is served by text models only"
        )
    return model
