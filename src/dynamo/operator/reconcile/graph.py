"""Reconcile of a DynamoGraphDeployment: the choice of its workload provider, then the plan of that provider."""

import dataclasses

from dynamo.operator.reconcile.automatic_checkpoints import automatic_checkpoints
from dynamo.operator.reconcile.component_graph import components_plan
from dynamo.operator.reconcile.graph_pass import GraphPass, ObservedGraph
from dynamo.operator.reconcile.graph_status import failed_plan
from dynamo.operator.reconcile.grove_graph import grove_plan
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import DISCOVERY_BACKEND_ANNOTATION, GraphContext, OperatorSettings, worker_hash
from dynamo.operator.reconcile.plan import Plan
from dynamo.operator.reconcile.provider import ClusterFacts, Provider, ProviderUnavailable, workload_provider
from dynamo.operator.reconcile.restores import restores_of
from dynamo.operator.validation.facts import WORKLOAD_PROVIDER
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

CANNOT_RENDER = "failed_to_reconcile_the_resources"


def graph_plan(
    graph: DynamoGraphDeployment,
    observed: ObservedGraph,
    settings: OperatorSettings,
    facts: ClusterFacts,
    now: str,
) -> Plan:
    """Return the objects of a graph and its next status. `now` is a timestamp of RFC 3339.

    A second pass over the state that results changes nothing. Objects are only deleted if the graph owns them. The
    provider is recorded in an annotation of the graph, after which it does not change. A graph that the cluster cannot
    run gets a status, no objects.
    """
    annotations = graph.metadata.annotations
    components = graph.spec.components or []
    provider: Provider | None = None
    try:
        provider = workload_provider(components, annotations, facts, observed.providers)
        context = context_of_graph(graph, settings, graph.metadata.namespace, is_in_place=provider == "grove")
        made = automatic_checkpoints(graph, context, observed.checkpoints, facts.topologies)
        restores = restores_of(made.graph.spec.components or [], observed.checkpoints, observed.snapshot_storage)
        context = dataclasses.replace(context, restores=restores)
        one_pass = GraphPass(made.graph, context, observed, now)
        plan = grove_plan(one_pass, facts) if provider == "grove" else components_plan(one_pass, facts)
        plan = dataclasses.replace(plan, create=[*plan.create, *made.owned], create_unowned=made.retained)
    except WorkloadError as error:
        one_pass = GraphPass(graph, context_of_graph(graph, settings, graph.metadata.namespace), observed, now)
        reason = error.reason if isinstance(error, ProviderUnavailable) else CANNOT_RENDER
        return failed_plan(one_pass, reason, str(error))
    if WORKLOAD_PROVIDER in annotations:
        return plan
    return dataclasses.replace(plan, annotations={**plan.annotations, WORKLOAD_PROVIDER: provider})


def context_of_graph(
    graph: DynamoGraphDeployment, settings: OperatorSettings, namespace: str, *, is_in_place: bool = False
) -> GraphContext:
    """Return the graph as its components see it; with `is_in_place`, names have no generation of the workers."""
    backend = graph.metadata.annotations.get(DISCOVERY_BACKEND_ANNOTATION) or settings.discovery_backend
    return GraphContext(
        name=graph.metadata.name,
        namespace=namespace,
        settings=dataclasses.replace(settings, discovery_backend=backend),
        worker_hash=worker_hash(graph),
        is_in_place=is_in_place,
    )
