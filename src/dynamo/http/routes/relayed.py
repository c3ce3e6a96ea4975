"""Relayed routes: what all routes share whose requests go to a worker as they are."""

from typing import NoReturn

from dynamo.core.errors import NotFound
from dynamo.http.routes.table import ErrorBody
from dynamo.serving.endpoints import Surface
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.models import ModelAccess, Models
from dynamo.serving.served_model import ServedModel


def never(*_: object) -> NoReturn:
    """Stands where a surface of generations makes its answers: a relayed one makes none."""
    raise AssertionError("a relayed answer has no chunks")


def relayed(endpoint: str, model_type: str, error_body: ErrorBody = ErrorAnswer.body) -> Surface:
    """The surface of a relayed endpoint: its label, who serves it, and how its errors are written."""
    return Surface(endpoint, model_type, response_id=str, chunks=never, body=never, error_body=error_body)


def text_model(models: Models, name: str | None, model_type: str, access: ModelAccess | None) -> ServedModel:
    """Return the set that serves requests of that type as clients write them. Raises what `Models.find` raises."""
    model = models.find(name or "", model_type, access)
    if not model.takes_text:
        raise NotFound(
            f"Model not found: {name!r} takes tokens, and {model_type.lower()} is served by text models only"
        )
    return model
