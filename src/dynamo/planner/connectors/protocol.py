"""Scale requests to a global planner and their responses, under upstream's path."""

import enum

from dynamo.protocols.scaling import ScaleRequest, ScaleResponse, TargetReplica

__all__ = ["ScaleRequest", "ScaleResponse", "ScaleStatus", "TargetReplica"]


ScaleStatus = enum.StrEnum(
    "ScaleStatus", {"SUCCESS": "success", "ERROR": "error", "REJECTED": "rejected", "SCALING": "scaling"}
)
"""Status of a response. Rejected: the request would leave the band of GPUs; decide again at the next tick."""
