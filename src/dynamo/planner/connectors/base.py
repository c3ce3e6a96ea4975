"""Interface of connectors: the planner's access to the workers of one deployment."""

import enum
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.protocols.planner import ScalingDecision, WorkerCounts


class ScaleStatus(enum.StrEnum):
    """Result of a scale request."""

    ACCEPTED = "accepted"
    """The environment applies the numbers; the workers may still be starting or draining."""
    HELD = "held"
    """Nothing was changed at this tick, for example because an earlier request is pending or the request was rejected."""
    FAILED = "failed"
    """The environment could not process the request."""


@dataclass(frozen=True, slots=True)
class ScaleOutcome:
    """Result of a scale request, with its reason."""

    status: ScaleStatus
    message: str = ""


class PlannerConnector(Protocol):
    """The workers of one deployment.

    The caller gives every call a deadline and may cancel it. A method that cannot return what it promises raises
    `DynamoException` or `OSError`: the planner then holds at this tick, and reports the reason.
    """

    async def start(self) -> None:
        """Prepare the connector and check the deployment. Raise `ConfigError` for a setting that cannot work."""

    async def counts(self) -> WorkerCounts:
        """Return the numbers of workers of the roles that exist; None where a number is unknown, never zero."""

    async def capabilities(self) -> WorkerCapabilities:
        """Return the capacity of one worker of each role; None where it is unknown."""

    async def scale(self, decision: ScalingDecision) -> ScaleOutcome:
        """Request numbers of workers, without waiting until they are ready."""

    async def close(self) -> None:
        """Release what `start` acquired. Workers keep running."""


@runtime_checkable
class GenerationalConnector(PlannerConnector, Protocol):
    """Connector of a deployment whose workers register in another namespace after each rolling update."""

    def worker_namespace(self) -> str:
        """Return the Dynamo namespace of the present workers."""
