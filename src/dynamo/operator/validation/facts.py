"""Problems that admission reports, and the facts about the cluster and the caller that the rules need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo.protocols.kubernetes.common import GROUP, KubeObject

OPERATOR_NAME = "dynamo-operator"
PLANNER_ACCOUNT = "planner-serviceaccount"
ANNOTATION = f"{GROUP}/"
WORKLOAD_PROVIDER = f"{ANNOTATION}workload-provider"
ENABLE_GROVE = f"{ANNOTATION}enable-grove"
DISCOVERY_MODE = f"{ANNOTATION}dynamo-kube-discovery-mode"
POWER_LIMIT = "dynamo.nvidia.com/gpu-power-limit"


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One field that a rule refuses."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(slots=True)
class Findings:
    """Problems and warnings of one object."""

    problems: list[FieldProblem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def refuse(self, path: str, reason: str) -> None:
        """Add a problem."""
        self.problems.append(FieldProblem(path, reason))

    def warn(self, path: str, text: str) -> None:
        """Add a warning; it does not refuse the object."""
        self.warnings.append(f"{path}: {text}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionFacts:
    """Facts that do not come from the object."""

    has_grove: bool | None = None
    """Whether Grove is installed and enabled; None: unknown, so that rules which depend on it are not applied."""
    user: str = ""
    """Name of the caller; empty: unknown, so that the caller has no special rights."""
    operator_users: frozenset[str] = frozenset()
    """Names of the callers that are the operator."""
    may_exist: bool = False
    """Whether an object without a former state may be an update, as in a file: rules of creation only warn."""

    @property
    def may_scale(self) -> bool:
        """Whether the caller may change the replicas that a scaling adapter owns."""
        account = self.user.rpartition(":")[2]
        return self.user in self.operator_users or (
            self.user.startswith("system:serviceaccount:") and account == PLANNER_ACCOUNT
        )


def uses_grove(metadata: Mapping[str, Any], facts: AdmissionFacts) -> bool | None:
    """Return whether a graph becomes a PodCliqueSet; None if the cluster is unknown."""
    annotations = annotations_of(metadata)
    provider = annotations.get(WORKLOAD_PROVIDER)
    if provider:
        return provider == "grove"
    if annotations.get(ENABLE_GROVE, "").lower() == "false":
        return False
    return facts.has_grove


def annotations_of(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations of an object's metadata."""
    return metadata.get("annotations") or {}


def part(value: Any, *names: str) -> KubeObject:
    """Return a nested object, or an empty one where a field on the way is absent or not an object."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def spec_of(value: KubeObject) -> KubeObject:
    """Return the `spec` of an object."""
    return part(value, "spec")
