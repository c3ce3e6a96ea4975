"""State of requests, models and checkpoints: phase, conditions, last event and the next step, from one object. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from dynamo.cli.graph_status import last_event_of
from dynamo.core.errors import ConfigError
from dynamo.k8s.kinds import CHECKPOINTS, GRAPH_REQUESTS, GRAPHS, MODELS, ObjectKind
from dynamo.operator.validation.facts import part
from dynamo.protocols.kubernetes.common import KubeObject

SHORT_NAMES = {"dgd": GRAPHS, "dgdr": GRAPH_REQUESTS, "dm": MODELS, "dckpt": CHECKPOINTS}
"""Kinds whose state is shown, in the order in which a name without a kind is looked up."""
HEAD = ("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE")
NONE = "-"


class ObjectReport(NamedTuple):
    """State of one object."""

    title: str
    rows: Sequence[tuple[str, ...]]
    """Table of components or conditions with its head; empty if there are none."""
    notes: Sequence[str]
    """Last event, endpoints, and what has to happen next."""
    is_ready: bool
    """Whether the object has reached its purpose."""
    is_final: bool
    """Whether the state does not change any more by itself."""


def target_of(text: str) -> tuple[ObjectKind | None, str]:
    """Return kind and name of `NAME` (the kind is None) or `KIND/NAME`. Raise `ConfigError` for another kind."""
    word, has_kind, name = text.partition("/")
    if not has_kind:
        return None, text
    kind = _kind_of(word)
    if kind is not None:
        return kind, name
    kinds = ", ".join(f"{short} ({kind.kind})" for short, kind in SHORT_NAMES.items())
    raise ConfigError(f"{text}: {word!r} must be one of {kinds}")


def is_kind(word: str) -> bool:
    """Return whether a word is the short or the full name of a kind, or its plural."""
    return _kind_of(word) is not None


def _kind_of(word: str) -> ObjectKind | None:
    names = SHORT_NAMES.items()
    return next((one for short, one in names if word.lower() in (short, one.kind.lower(), one.plural)), None)


def report_of(kind: ObjectKind, value: KubeObject, events: Sequence[KubeObject]) -> ObjectReport:
    """Return the state of a request, a model or a checkpoint."""
    status, name = part(value, "status"), str(part(value, "metadata").get("name"))
    phase, next_step, is_ready, is_final = STATES[kind](name, value, status)
    conditions = [one for one in status.get("conditions") or () if isinstance(one, dict)]
    rows: list[tuple[str, ...]] = [
        tuple(_line(one.get(field)) for field in ("type", "status", "reason", "lastTransitionTime", "message"))
        for one in conditions
    ]
    event = last_event_of(events, kind.kind, name)
    notes = [f"last event: {event}"] if event else []
    if next_step:
        notes.append(f"next: {next_step}")
    table = [HEAD, *rows] if rows else []
    return ObjectReport(f"{kind.kind}/{name}: {phase}", table, notes, is_ready, is_final)


State = tuple[str, str, bool, bool]
"""Phase, next step, whether the purpose is reached, whether the state is final."""


def _request(name: str, value: KubeObject, status: KubeObject) -> State:
    phase = str(status.get("phase") or "")
    graph, job = status.get("dgdName") or "the generated graph", status.get("profilingJobName") or f"profile-{name}"
    steps = {
        "": "the operator takes up the request; if it does not, check that it runs",
        "Pending": "the operator checks the request and creates the profiling job",
        "Profiling": f"job {job} ends; its output: dynamo deploy logs dgdr/{name}",
        "Ready": "apply the graph in status.profilingResults.selectedConfig: the request has autoApply: false",
        "Deploying": f"graph {graph} becomes ready: dynamo deploy status dgd/{graph}",
        "Failed": f"correct {_failure(status)}, and create another request: this one is not taken up again",
    }
    stuck = next((one for one in status.get("conditions") or () if one.get("reason") == "ImagePullFailed"), None)
    if phase == "Profiling" and stuck is not None:
        steps["Profiling"] = f"make the image available: {stuck.get('message')}"
    shown = f"{phase} ({status['profilingPhase']})" if status.get("profilingPhase") else phase or "not reported"
    counts = status.get("deploymentInfo") or {}
    if phase in ("Deploying", "Deployed") and counts:
        shown += f", {counts.get('availableReplicas') or 0}/{counts.get('replicas') or 0} replicas of {graph} available"
    return shown, steps.get(phase, ""), phase in ("Ready", "Deployed"), phase in ("Ready", "Failed")


def _failure(status: KubeObject) -> str:
    """Return the cause of a failure: the message of the first condition that is false, except the summary."""
    failed = [
        one
        for one in status.get("conditions") or ()
        if one.get("status") == "False" and one.get("type") != "Succeeded" and one.get("reason") != "SpecChangeRejected"
    ]
    return f"the cause ({_line(failed[-1].get('message'))})" if failed else "the cause"


def _model(name: str, value: KubeObject, status: KubeObject) -> State:
    ready, total = int(status.get("readyEndpoints") or 0), int(status.get("totalEndpoints") or 0)
    spec = part(value, "spec")
    if not status:
        return "not reported", "the operator takes up the model; if it does not, check that it runs", False, False
    if not total:
        base = spec.get("baseModelName")
        return "no endpoints", f"a component with modelRef.name {base!r} gets ready pods", False, False
    waiting = [str(one.get("podName")) for one in status.get("endpoints") or () if not one.get("ready")]
    step = f"these pods serve the model: {', '.join(waiting)}" if waiting else ""
    return f"{ready}/{total} endpoints ready", step, ready >= total, False


def _checkpoint(name: str, value: KubeObject, status: KubeObject) -> State:
    phase = str(status.get("phase") or "")
    job = status.get("jobName") or "of the checkpoint"
    steps = {
        "": "the operator takes up the checkpoint; if it does not, check that it runs",
        "Pending": f"job {job} starts",
        "Creating": f"job {job} ends; its output: dynamo deploy logs dckpt/{name}",
        "Failed": f"correct the cause ({_line(status.get('message'))}), and create another checkpoint",
    }
    return phase or "not reported", steps.get(phase, ""), phase == "Ready", phase in ("Ready", "Failed")


STATES = {GRAPH_REQUESTS: _request, MODELS: _model, CHECKPOINTS: _checkpoint}


def _line(value: object) -> str:
    return " ".join(str(value or "").split()) or NONE
