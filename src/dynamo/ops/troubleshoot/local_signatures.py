"""Signatures of the processes of a local graph: their states, namespaces and registrations, and refused requests. Pure."""

from collections.abc import Iterator

from dynamo.ops.report import CheckStatus
from dynamo.ops.troubleshoot.case import CaseFacts, total
from dynamo.ops.troubleshoot.graph_signatures import is_frontend
from dynamo.ops.troubleshoot.pod_signatures import of_objects
from dynamo.ops.troubleshoot.signature import EvidenceLine

STOPPED = {"T": "stopped", "t": "stopped by a debugger"}
"""States of /proc/PID/stat in which a process does nothing until it is continued."""
MODEL_RECORDS = "v1/mdc/"
REFUSALS = {
    "dynamo_frontend_model_rejection_total": "all workers were above a busy threshold",
    "dynamo_frontend_router_queue_backpressure_total": "the router's queue was full",
    "dynamo_frontend_router_admission_rejected_total": "the deadline passed in the router's queue",
    "dynamo_work_handler_enqueue_rejected_total": "the slots and the queue of a worker were full",
}
"""Counters of refused requests, and the reason of each."""


def stopped_processes(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the processes that are stopped."""
    for one in case.processes:
        if one.state in STOPPED:
            yield EvidenceLine(one.name, f"{STOPPED[one.state]} (state {one.state})")


def lost_workers(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the registrations of models that their workers no longer renew."""
    for key, seconds in case.expired:
        if key.startswith(MODEL_RECORDS):
            yield EvidenceLine(f"record {key}", f"last renewed {seconds:.0f} s ago")


def unserved_namespaces(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the frontends of a namespace in which no model is registered, and the namespaces that have models."""
    keys = [one.key for one in case.records if one.key.startswith(MODEL_RECORDS)]
    found = sorted({key.removeprefix(MODEL_RECORDS).partition("/")[0] for key in keys})
    for one in case.processes:
        wanted = one.variables.get("DYN_NAMESPACE")
        if found and wanted and is_frontend(one) and wanted not in found and not case.models:
            yield EvidenceLine(one.name, f"serves namespace {wanted}; models are registered in {', '.join(found)}")


def refused_requests(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the counters of requests that were refused for lack of capacity."""
    for source, text in case.metrics.items():
        for name, reason in REFUSALS.items():
            if count := total(text, name):
                yield EvidenceLine(source, f"{count:.0f} requests refused because {reason}")


LOCAL_SIGNATURES = (
    of_objects(
        "stopped-process",
        stopped_processes,
        "A process is stopped by SIGSTOP, Ctrl-Z or a debugger: its connections stay open and its requests wait",
        "kill -CONT PID, or end it; dynamo status shows the processes of dynamo serve",
    ),
    of_objects(
        "namespace-mismatch",
        unserved_namespaces,
        "The frontend serves another namespace than the one in which the workers register",
        "set the same --namespace (DYN_NAMESPACE) for the frontend and the workers, or none for the frontend",
    ),
    of_objects(
        "worker-lost",
        lost_workers,
        "A worker ended without removing its registration: it was killed, stopped for too long, or its machine was lost",
        "dmesg | grep -i oom; read the end of its log; start it again",
        status=CheckStatus.WARN,
    ),
    of_objects(
        "requests-refused",
        refused_requests,
        "Requests exceeded the capacity that the limits allow and were refused with 503 or 529",
        "add workers, or raise the limit that the error message names; dynamo requests --failed shows the requests",
        status=CheckStatus.WARN,
    ),
)
