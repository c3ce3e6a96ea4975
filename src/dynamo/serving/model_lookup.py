"""Look-up of a model by its name: the worker set that serves a kind of request, or the error that the client receives."""

import random
import time
from collections.abc import Sequence
from typing import Protocol

from dynamo.core.errors import NotFound, NotReady
from dynamo.serving.served_model import ServedModel

MODEL_NAME_CHARS_MAX = 1024  # A longer name is neither looked up nor repeated in the error.
DEPARTED_S = 10.0  # By then a live worker has rewritten a lost record, and a restarted one is registered.
DEPARTED_MAX = 1024
DEPARTED = "Model `{name}` has no worker at the moment: the last one left just now. Please retry shortly."


class ModelAccess(Protocol):
    """Models that a caller may use."""

    def may_use(self, model: str) -> bool:
        """Return whether the caller may use the model."""

    def require(self, model: str) -> None:
        """Raise `HttpError` (403) for a model that the caller may not use."""


class DepartedModels:
    """Names and aliases of models whose last worker left a moment ago."""

    def __init__(self) -> None:
        self._departed: dict[str, tuple[float, str]] = {}
        """Time at which the last worker left, and its endpoint; oldest first."""

    def add(self, names: Sequence[str], endpoint: str) -> None:
        """Record that the last worker of a model, which has these names, left its endpoint."""
        for name in names:
            self._departed.pop(name, None)
            self._departed[name] = time.monotonic(), endpoint
        while len(self._departed) > DEPARTED_MAX:
            del self._departed[next(iter(self._departed))]

    def endpoint_of(self, name: str) -> str | None:
        """Return the endpoint of a model that left less than `DEPARTED_S` ago; None for any other name."""
        left_at, endpoint = self._departed.get(name, (-DEPARTED_S, ""))
        return None if time.monotonic() - left_at >= DEPARTED_S else endpoint


def check_name(name: str) -> None:
    """Raise `NotFound` for a name that is longer than any model's."""
    if len(name) > MODEL_NAME_CHARS_MAX:
        raise NotFound(
            f"Model not found: the name has {len(name)} characters; at most {MODEL_NAME_CHARS_MAX} are allowed"
        )


def choose_set(name: str, kind: str, sets: Sequence[ServedModel]) -> ServedModel:
    """Return one of a model's worker sets that serves requests of a kind, in proportion to the workers.

    Raise `NotFound` if none serves the kind, `NotReady` if none of those that do is ready.
    """
    able = [one for one in sets if kind in one.card.model_type]
    if not able:
        raise NotFound(f"Model not found: {name!r} does not serve {kind.lower()}")
    ready = [one for one in able if one.is_ready]
    if len(ready) == 1:
        return ready[0]
    if ready:
        return random.choices(ready, weights=[len(one.worker_ids()) for one in ready])[0]
    raise NotReady(
        f"Model `{name}` is not ready to serve requests yet. {_missing(able)} Please retry shortly.",
    )


def _missing(sets: Sequence[ServedModel]) -> str:
    """Return what worker sets that are not ready lack."""
    early = next((one for one in sets if one.worker_ids() and not one.has_begun), None)
    if early is not None:
        return f"{len(early.worker_ids())} of the {early.workers_min} workers required at startup have registered."
    if any(one.worker_ids() for one in sets):
        return "It has decode workers but no prefill worker."
    return "None of its workers is reachable."
