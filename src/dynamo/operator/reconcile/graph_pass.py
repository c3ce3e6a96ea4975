"""One pass over one graph: its desired state, the objects it owns, and what the pass reports."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.operator.reconcile.names import COMPONENT, WORKER_HASH, GraphContext, SnapshotStorage
from dynamo.operator.reconcile.plan import EventNote, ObjectRef
from dynamo.operator.reconcile.provider import Provider
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.models import DynamoCheckpoint
from dynamo.protocols.kubernetes.v1beta1 import (
    ComponentSpec,
    DynamoComponentDeployment,
    DynamoGraphDeployment,
    GraphStatus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedGraph:
    """Objects that a graph owns, as the cluster has them."""

    components: Sequence[DynamoComponentDeployment] = ()
    adapters: Sequence[str] = ()
    """Names of the scaling adapters."""
    owned: Sequence[ObjectRef] = ()
    """Further objects that are deleted when the graph no longer requires them: Services, Ingresses and the like."""
    clique_set: KubeObject | None = None
    """The PodCliqueSet."""
    cliques: Sequence[KubeObject] = ()
    """PodCliques and PodCliqueScalingGroups of the PodCliqueSet."""
    checkpoints: Sequence[DynamoCheckpoint] = ()
    """All of the namespace, if a component has one."""
    snapshot_storage: SnapshotStorage | None = None

    @property
    def providers(self) -> tuple[Provider, ...]:
        """Providers whose workloads exist."""
        found: list[Provider] = []
        if self.clique_set is not None:
            found.append("grove")
        if self.components:
            found.append("component")
        return tuple(found)


@dataclass(slots=True)
class GraphPass:
    """One pass over one graph."""

    graph: DynamoGraphDeployment
    context: GraphContext
    observed: ObservedGraph
    now: str
    events: list[EventNote] = field(default_factory=list)

    @property
    def components(self) -> Sequence[ComponentSpec]:
        """Desired components."""
        return self.graph.spec.components or []

    @property
    def status(self) -> GraphStatus:
        """Status before this pass."""
        return self.graph.status or GraphStatus()

    def current(self, component: ComponentSpec) -> DynamoComponentDeployment | None:
        """Return the object of a component in its desired generation."""
        name = self.context.object_name(component)
        return next((one for one in self.observed.components if one.metadata.name == name), None)

    def earlier(self, component: ComponentSpec | None = None) -> list[DynamoComponentDeployment]:
        """Return the workers of other generations, of one component or of all."""
        return [
            one
            for one in self.observed.components
            if WORKER_HASH in one.metadata.labels
            and one.metadata.labels[WORKER_HASH] != self.context.worker_hash
            and (component is None or one.metadata.labels.get(COMPONENT) == component.name)
        ]

    def is_rolling(self) -> bool:
        """Return whether workers of another generation exist."""
        return bool(self.earlier())
