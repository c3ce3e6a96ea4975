"""Signatures of a whole graph: resources' states, endpoints, discovery, versions, roles and metrics. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from dynamo.operator.reconcile.names import COMPONENT_TYPE, GRAPH
from dynamo.operator.validation.facts import part
from dynamo.ops.report import CheckStatus
from dynamo.ops.settings_in_force import PLANE_SETTINGS, REGISTRY_SETTINGS, is_same, settings_in_force
from dynamo.ops.troubleshoot.case import CaseFacts, CaseProcess, total
from dynamo.ops.troubleshoot.pod_signatures import conditions, name_of, of_objects
from dynamo.ops.troubleshoot.signature import EvidenceLine, excerpt
from dynamo.protocols.kubernetes.common import KubeObject

AGGREGATED = "aggregated"
SUB_COMPONENT_TYPE = "nvidia.com/dynamo-sub-component-type"
REQUESTS = "dynamo_frontend_requests_total"
EVENTS = "dynamo_component_kv_cache_events_applied"
DECISIONS = "dynamo_component_router_requests_total"
SILENT = "dynamo_component_router_kv_event_source_mismatch_workers"
FAILED_START = "failed-start"
"""Directory of the log of a start that failed, among the logs of a case."""
REQUESTS_MIN = 20  # Below it a router may not have seen an event yet.


Part = tuple[str, Mapping[str, str]]
"""Name and environment of a process or container."""


def pod_groups(case: CaseFacts) -> Iterator[list[Part]]:
    """Yield the containers of each graph with their environments."""
    found: defaultdict[str, list[Part]] = defaultdict(list)
    for pod in case.of("Pod"):
        graph = part(pod, "metadata", "labels").get(GRAPH)
        for one in part(pod, "spec").get("containers") or () if graph else ():
            pairs = {str(each.get("name")): str(each["value"]) for each in one.get("env") or () if "value" in each}
            words = [str(word) for word in [*(one.get("command") or ()), *(one.get("args") or ())]]
            found[str(graph)].append((f"{name_of(pod)}/{one.get('name')}", settings_in_force(pairs, words)))
    yield from found.values()


def process_groups(case: CaseFacts) -> dict[tuple[str, ...], list[CaseProcess]]:
    """Return the local processes by their registry: those of one registry are one graph."""
    found: defaultdict[tuple[str, ...], list[CaseProcess]] = defaultdict(list)
    for one in case.processes:
        found[tuple(one.variables.get(name, "") for name in REGISTRY_SETTINGS)].append(one)
    return found


def differing(parts: Iterable[Part], settings: tuple[str, ...]) -> Iterator[EvidenceLine]:
    """Yield the settings that have several values in one graph, with a process for each value."""
    for setting in settings:
        holders: dict[str, str] = {}
        for name, variables in parts:
            value = variables.get(setting)
            if value and not any(is_same(setting, value, other) for other in holders):
                holders[value] = name
        if len(holders) > 1:
            for value, name in holders.items():
                yield EvidenceLine(name, f"{setting}={value}")


def discovery_mismatch(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the settings of discovery that differ within a graph, and workers without a frontend in their registry."""
    for parts in pod_groups(case):
        yield from differing(parts, (*REGISTRY_SETTINGS, "NATS_SERVER"))
    groups = process_groups(case)
    alone = {key: own for key, own in groups.items() if all(is_frontend(one) for one in own)}
    without = {key: own for key, own in groups.items() if not any(is_frontend(one) for one in own)}
    if alone and without:
        for key, own in (*alone.items(), *without.items()):
            pairs = [f"{name}={value}" for name, value in zip(REGISTRY_SETTINGS, key, strict=True) if value]
            yield EvidenceLine(own[0].name, " ".join(pairs) or "default registry")


def is_frontend(process: CaseProcess) -> bool:
    """Return whether a process is a frontend."""
    return process.name.startswith("dynamo.frontend")


def plane_mismatch(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the planes that differ within a graph, and event channels of two kinds in discovery."""
    groups = [*pod_groups(case), *([(one.name, one.variables) for one in own] for own in process_groups(case).values())]
    for parts in groups:
        yield from differing(parts, PLANE_SETTINGS)
    kinds: dict[str, str] = {}
    for record in case.records:
        if record.key.startswith("v1/event_channels/"):
            kinds.setdefault(str(part(record.value, "transport").get("kind") or ""), record.key)
    if len(kinds) > 1:
        for kind, key in kinds.items():
            yield EvidenceLine(f"record {key}", f"event channel of kind {kind}")


def image_skew(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the tags of one repository that differ within a graph, and processes of different releases."""
    tags: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for pod in case.of("Pod"):
        graph = part(pod, "metadata", "labels").get(GRAPH)
        for one in part(pod, "spec").get("containers") or ():
            repository, colon, tag = str(one.get("image") or "").rpartition(":")
            if graph and colon and "/" not in tag:
                tags[str(graph), repository].setdefault(tag, name_of(pod))
    for (_, repository), found in tags.items():
        if len(found) > 1:
            for tag, name in found.items():
                yield EvidenceLine(name, f"image {repository}:{tag}")
    for own in process_groups(case).values():
        versions = {one.version: one.name for one in own if one.version}
        if len(versions) > 1:
            for version, name in versions.items():
                yield EvidenceLine(name, f"release {version}")


def failed_requests(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the deployment requests that failed."""
    for one in case.of("DynamoGraphDeploymentRequest"):
        status = part(one, "status")
        states = {str(status.get(field) or "") for field in ("phase", "state")}
        if "Failed" in states:
            reasons = [
                each for each in conditions(one) if each.get("status") == "False" or each.get("type") == "Failed"
            ]
            text = "; ".join(f"{each.get('reason')}: {each.get('message') or ''}" for each in reasons)
            yield EvidenceLine(name_of(one), f"Failed: {text or status.get('message') or 'no reason is given'}")


def graphs_without_status(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the graphs that no operator has reported on, or not since their last change."""
    for graph in case.of("DynamoGraphDeployment"):
        status, metadata = part(graph, "status"), part(graph, "metadata")
        seen, generation = status.get("observedGeneration"), metadata.get("generation")
        if not status:
            yield EvidenceLine(name_of(graph), "has no status")
        elif isinstance(seen, int) and isinstance(generation, int) and seen < generation:
            yield EvidenceLine(name_of(graph), f"status is of generation {seen}, the specification of {generation}")


def graphs_not_ready(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the conditions of graphs that are not ready."""
    for graph in case.of("DynamoGraphDeployment"):
        for one in conditions(graph):
            if one.get("type") in {"Ready", "Available"} and one.get("status") == "False":
                yield EvidenceLine(name_of(graph), f"{one.get('reason') or 'NotReady'}: {one.get('message') or ''}")


def endpoints_missing(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the endpoint slices without a ready address."""
    for one in case.of("EndpointSlice"):
        ends = [each for each in one.get("endpoints") or () if isinstance(each, dict)]
        if not any(part(each, "conditions").get("ready") is not False and each.get("addresses") for each in ends):
            yield EvidenceLine(name_of(one), f"{len(ends)} endpoints, none of them ready")


def models_missing(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the frontend's answer if it lists no model."""
    if case.models == ():
        instances = (case.health or {}).get("instances") or ()
        yield EvidenceLine("frontend", f"/v1/models is empty, /health lists {len(instances)} instances")


def frontend_unhealthy(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the frontend's health if it is not healthy."""
    if case.health is not None and case.health.get("status") not in {None, "healthy", "ready"}:
        stage = case.health.get("stage")
        yield EvidenceLine("frontend", f"/health: {case.health['status']}{f', stage {stage}' if stage else ''}")


def roles_missing(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the models and graphs of which one phase has workers and the other has none."""
    roles: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for record in case.records:
        if record.card:
            role = str(record.card.get("worker_type") or AGGREGATED).lower()
            roles[f"model {record.card.get('display_name')}"].setdefault(role, f"record {record.key}")
    for pod in case.of("Pod"):
        labels = part(pod, "metadata", "labels")
        role = str(labels.get(SUB_COMPONENT_TYPE) or labels.get(COMPONENT_TYPE) or "").lower()
        if labels.get(GRAPH) and role in {"prefill", "decode", "worker"}:
            roles[f"graph {labels[GRAPH]}"].setdefault(AGGREGATED if role == "worker" else role, name_of(pod))
    for subject, found in roles.items():
        for role, peer in (("prefill", "decode"), ("decode", "prefill")):
            if role in found and not {peer, AGGREGATED} & found.keys():
                yield EvidenceLine(found[role], f"{subject}: {role} workers only, no {peer} worker")


def events_missing(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the routers whose workers publish no KV events, and those that have applied none."""
    for source, text in case.metrics.items():
        silent, routed, applied = total(text, SILENT), total(text, DECISIONS), total(text, EVENTS)
        if silent:
            yield EvidenceLine(source, f"{silent:.0f} workers publish no KV events although the router expects them")
        elif routed is not None and routed >= REQUESTS_MIN and applied == 0:
            yield EvidenceLine(source, f"{routed:.0f} requests routed by cached blocks, no KV event applied")


def errors_frequent(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the frontends of which many requests failed."""
    for source, text in case.metrics.items():
        requests = total(text, REQUESTS) or 0
        errors = total(text, REQUESTS, {"status": "error"}) or 0
        if requests >= REQUESTS_MIN and errors > 0.1 * requests:
            yield EvidenceLine(source, f"{errors:.0f} of {requests:.0f} requests failed")


def doctor_failures(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the failed checks of the doctor that are part of a bundle."""
    for check, evidence, remedy in case.failures:
        yield EvidenceLine(f"doctor {check}", f"{evidence} -> {remedy}")


def failed_starts(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the command line and the error of a start that failed before there was a graph."""
    for source, text in case.logs.items():
        if source.startswith(f"{FAILED_START}/"):
            yield EvidenceLine(source, excerpt(" ".join(text.split()), 0))


def job_waits(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the running jobs whose log waits for an endpoint."""
    active: list[KubeObject] = [job for job in case.of("Job") if part(job, "status").get("active")]
    for job in active:
        name = str(part(job, "metadata").get("name") or "")
        for source, text in case.logs.items():
            last = text.strip().splitlines()[-1:] or [""]
            if source.startswith(f"pod/{name}-") and "wait" in last[0].lower():
                yield EvidenceLine(name_of(job), f"active, last line: {last[0].strip()[:200]}")


GRAPH_SIGNATURES = (
    of_objects(
        "webhook",
        None,
        "The API server cannot call the operator's webhook, so objects can be neither created nor converted",
        "kubectl get pods -l app.kubernetes.io/name=dynamo-operator -A; check its service, certificate and network policy",
        pattern=r"failed calling webhook|conversion webhook for .* failed|webhook.*(?:context deadline exceeded|x509)",
    ),
    of_objects(
        "operator-absent",
        graphs_without_status,
        "No operator handles the graph: it does not run, or it watches other namespaces",
        "kubectl get pods -l app.kubernetes.io/name=dynamo-operator -A; read its log",
    ),
    of_objects(
        "request-failed",
        failed_requests,
        "The profiling of the deployment request failed",
        "kubectl describe dgdr NAME; kubectl logs job/JOB of the profiler",
        pattern=r"JobCreationFailed|ProfilingFailed",
    ),
    of_objects(
        "discovery-mismatch",
        discovery_mismatch,
        "Processes of one graph use different registries or namespaces and do not find each other",
        "set the same discovery settings for all processes; dynamo doctor shows the ones in force",
    ),
    of_objects(
        "plane-mismatch",
        plane_mismatch,
        "Processes of one graph use different request or event planes",
        "set the same --event-plane and --request-plane for all processes",
    ),
    of_objects(
        "version-skew",
        image_skew,
        "Parts of one graph are of different releases; wire formats may differ",
        "use one image tag for all components; kubectl rollout status",
        status=CheckStatus.WARN,
    ),
    of_objects(
        "missing-peer-role",
        roles_missing,
        "Prefill and decode workers need each other, and one phase has no worker",
        "start workers of the missing phase in the same namespace; read their logs",
    ),
    of_objects(
        "router-without-events",
        events_missing,
        "The KV router receives no KV events: workers do not publish them, or on another event plane",
        "enable KV events of the engine (--kv-events-config), compare --event-plane and --kv-cache-block-size",
        status=CheckStatus.WARN,
    ),
    of_objects(
        "doctor",
        doctor_failures,
        "A check of the machine fails",
        "follow the remedy after the first arrow; dynamo doctor shows all checks",
    ),
    of_objects(
        "failed-start",
        failed_starts,
        "The last `dynamo serve` ended before it started a graph",
        "correct what the message names; dynamo serve --help lists the options",
        is_symptom=True,
    ),
    of_objects(
        "frontend-unhealthy",
        frontend_unhealthy,
        "The frontend is draining, or its watch of discovery ended",
        "read the frontend's log; restart it if the stage is discovery",
    ),
    of_objects(
        "request-errors",
        errors_frequent,
        "Many requests fail",
        "read the workers' logs; dynamo route explain shows the chosen workers",
        status=CheckStatus.WARN,
        is_symptom=True,
    ),
    of_objects(
        "no-models",
        models_missing,
        "No worker has registered a model: workers still load it, have ended, or use other discovery settings",
        "dynamo doctor; read the workers' logs",
        is_symptom=True,
    ),
    of_objects(
        "job-waits",
        job_waits,
        "A job waits for an endpoint that does not respond",
        "kubectl get pods,svc; check the endpoint's name in the job",
        status=CheckStatus.WARN,
        is_symptom=True,
    ),
    of_objects(
        "no-endpoints",
        endpoints_missing,
        "A service has no ready address",
        "kubectl get pods; the pods behind it are not ready",
        status=CheckStatus.WARN,
        is_symptom=True,
    ),
    of_objects(
        "graph-not-ready",
        graphs_not_ready,
        "The graph is not ready",
        "dynamo deploy status NAME; the causes above name the reason",
        is_symptom=True,
    ),
)
