"""Defaults of the planner's settings, and the names of the worker roles, under upstream's path."""

import dataclasses
import enum
from typing import Any

from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.protocols.scaling import TargetReplica

__all__ = ["SLAPlannerDefaults", "SubComponentType", "TargetReplica"]


class SubComponentType(enum.StrEnum):
    """Role of workers."""

    PREFILL = "prefill"
    DECODE = "decode"


def defaults() -> dict[str, Any]:
    """Return the default of each setting that has one."""
    found = {one.name: one.default for one in dataclasses.fields(PlannerConfig)}
    return {name: value for name, value in found.items() if value is not dataclasses.MISSING}


SLAPlannerDefaults = type(
    "SLAPlannerDefaults", (), {"__doc__": "Default of each setting, as attributes.", **defaults()}
)
