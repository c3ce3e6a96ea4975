"""Case: what was collected of one deployment, read from the files of a collection or a bundle. Pure."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from dynamo.operator.validation.facts import part
from dynamo.protocols.kubernetes.common import KubeObject

LISTS = {
    "pods.json": "Pod",
    "events.json": "Event",
    "jobs.json": "Job",
    "claims.json": "PersistentVolumeClaim",
    "graphs.json": "DynamoGraphDeployment",
    "requests.json": "DynamoGraphDeploymentRequest",
    "slices.json": "EndpointSlice",
    "adapters.json": "DynamoGraphDeploymentScalingAdapter",
    "components.json": "DynamoComponentDeployment",
}
"""Files of Kubernetes objects, and the kind of their items."""
NOT_LOGS = frozenset({"README.txt", "packages.txt", "system.txt", "report.txt", "processes.txt", "conditions.txt"})
"""Text files of a bundle in which words such as `error` do not report a failure."""
LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseProcess:
    """One process of a local graph."""

    name: str
    version: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    """Letter of /proc/PID/stat, such as S or T; empty if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """One record of discovery."""

    key: str
    value: Mapping[str, Any]

    @property
    def card(self) -> Mapping[str, Any]:
        """Return the model card of a model record; empty for other records."""
        card = self.value.get("card_json")
        return card if isinstance(card, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFacts:
    """Everything that signatures are matched against."""

    logs: Mapping[str, str] = field(default_factory=dict)
    """Text by source, such as `worker-1.log` or `pod/worker-0/main`."""
    objects: Mapping[str, tuple[KubeObject, ...]] = field(default_factory=dict)
    """Kubernetes objects by kind."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Expositions by source."""
    health: Mapping[str, Any] | None = None
    models: tuple[str, ...] | None = None
    """Models that the frontend lists; None if it was not reached."""
    records: tuple[CaseRecord, ...] = ()
    expired: tuple[tuple[str, float], ...] = ()
    """Keys of records that expired, and seconds since their last renewal."""
    processes: tuple[CaseProcess, ...] = ()
    failures: tuple[tuple[str, str, str], ...] = ()
    """Failed checks of the doctor: check, evidence and remedy."""

    def of(self, kind: str) -> tuple[KubeObject, ...]:
        """Return the objects of a kind."""
        return self.objects.get(kind, ())

    @property
    def open_events(self) -> tuple[KubeObject, ...]:
        """Return the events, without those of pods that are ready now: their failures have passed."""
        ready = {name for pod in self.of("Pod") if (name := ready_pod(pod))}
        return tuple(one for one in self.of("Event") if part(one, "involvedObject").get("name") not in ready)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was collected."""
        return self.summary == "nothing"

    @property
    def summary(self) -> str:
        """Return what was collected, with counts."""
        counts = {
            "logs": len(self.logs),
            **{f"{kind} objects": len(found) for kind, found in sorted(self.objects.items())},
            "discovery records": len(self.records),
            "processes": len(self.processes),
            "metrics pages": len(self.metrics),
            "failed checks": len(self.failures),
        }
        text = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"{text}{', /health' if self.health is not None else ''}" or "nothing"


def case_of(files: Mapping[str, str]) -> CaseFacts:
    """Return the case of a collection. Files of other kinds and malformed JSON are ignored."""
    objects: dict[str, list[KubeObject]] = {}
    logs: dict[str, str] = {}
    metrics: dict[str, str] = {}
    for name, text in files.items():
        base = PurePosixPath(name).name
        if base in LISTS:
            for one in items_of(text):
                objects.setdefault(str(one.get("kind") or LISTS[base]), []).append(one)
        elif base.endswith((".yaml", ".yml")):
            for one in yaml_objects(text):
                objects.setdefault(str(one["kind"]), []).append(one)
        elif base.startswith("metrics") and base.endswith((".txt", ".prom")):
            metrics[name] = text
        elif base.endswith((".log", ".txt")) and base not in NOT_LOGS:
            logs[source_of(name)] = ANSI.sub("", text)
    health, models = _json(files.get("health.json", "")), _json(files.get("models.json", ""))
    return CaseFacts(
        logs=logs,
        objects={kind: tuple(found) for kind, found in objects.items()},
        metrics=metrics,
        health=health if isinstance(health, dict) and health else None,
        models=_model_names(models),
        records=tuple(_records(_json(files.get("discovery.json", "")))),
        expired=tuple(_expired(_json(files.get("expired.json", "")))),
        processes=tuple(_processes(_json(files.get("processes.json", "")))),
        failures=tuple(_failures(_json(files.get("report.json", "")))),
    )


def ready_pod(pod: KubeObject) -> str:
    """Return the name of a pod that is ready; empty for another one."""
    found = part(pod, "status").get("conditions")
    is_ready = any(
        one.get("type") == "Ready" and one.get("status") == "True" for one in found or () if isinstance(one, dict)
    )
    return str(part(pod, "metadata").get("name") or "") if is_ready else ""


def source_of(name: str) -> str:
    """Return the source of a log file: `pod/POD/CONTAINER` of a cluster's, otherwise its name."""
    parts = PurePosixPath(name).parts
    if len(parts) >= 3 and parts[-3] == "pods":
        return f"pod/{parts[-2]}/{parts[-1].removesuffix('.log')}"
    match = re.fullmatch(r"(?:logs|describe)-(.+)\.txt", parts[-1])
    if match and len(parts) <= 2:
        return f"pod/{match[1]}"
    return "/".join(parts[-2:]) if len(parts) > 2 else parts[-1]


def items_of(text: str) -> list[KubeObject]:
    """Return the objects of a JSON list, or of a `List` as kubectl prints it."""
    value = _json(text)
    found = value.get("items") if isinstance(value, dict) else value
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def yaml_objects(text: str) -> list[KubeObject]:
    """Return the objects of a YAML file, with those of lists; none of a malformed one."""
    try:
        documents = [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
    except yaml.YAMLError:
        return []
    nested = [item for one in documents if str(one.get("kind")).endswith("List") for item in one.get("items") or ()]
    return [one for one in [*documents, *nested] if isinstance(one, dict) and isinstance(one.get("kind"), str)]


def total(text: str, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """Return the sum of a family's samples with the given labels; None if there is no sample of that name."""
    found: float | None = None
    for line in text.splitlines():
        if not line.startswith(name) or line[len(name) : len(name) + 1] not in {"{", " "}:
            continue
        head, _, value = line.partition("}") if "{" in line else (name, "", line[len(name) :])
        try:
            number = float(value.split()[0])
        except (ValueError, IndexError):
            continue
        given = dict(LABEL.findall(head))
        if labels is None or labels.items() <= given.items():
            found = (found or 0.0) + number
        elif found is None:
            found = 0.0
    return found


def _model_names(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, dict) or not isinstance(value.get("data"), list):
        return None
    return tuple(str(one.get("id")) for one in value["data"] if isinstance(one, dict))


def _records(value: Any) -> Iterable[CaseRecord]:
    for one in value if isinstance(value, list) else ():
        if isinstance(one, dict) and isinstance(one.get("key"), str):
            content = _json(one["value"]) if isinstance(one.get("value"), str) else one.get("value")
            yield CaseRecord(key=one["key"], value=content if isinstance(content, dict) else {})


def _processes(value: Any) -> Iterable[CaseProcess]:
    for one in value if isinstance(value, list) else ():
        if isinstance(one, dict) and isinstance(one.get("module"), str):
            variables = one.get("variables")
            yield CaseProcess(
                name=f"{one['module']} (pid {one.get('pid')})",
                version=str(one.get("version") or ""),
                variables=variables if isinstance(variables, dict) else {},
                state=str(one.get("state") or ""),
            )


def _expired(value: Any) -> Iterable[tuple[str, float]]:
    for one in value if isinstance(value, list) else ():
        if isinstance(one, dict) and isinstance(one.get("key"), str) and isinstance(one.get("seconds"), int | float):
            yield one["key"], float(one["seconds"])


def _failures(value: Any) -> Iterable[tuple[str, str, str]]:
    for one in (value.get("rows") or ()) if isinstance(value, dict) else ():
        if isinstance(one, dict) and one.get("status") == "FAIL":
            yield str(one.get("check")), str(one.get("evidence")), str(one.get("remedy"))


def _json(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None
