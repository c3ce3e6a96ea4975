"""Evidence: the files and the summary of upstream's `collect-evidence.sh` for one resource, from a collection of its namespace."""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError, DynamoException, StartupError
from dynamo.operator.validation.facts import part
from dynamo.ops.troubleshoot.case import items_of
from dynamo.protocols.kubernetes.common import KubeObject

KINDS = {"dgd": "graphs.json", "dgdr": "requests.json", "dgdsa": "adapters.json", "dcd": "components.json"}
"""Short names of the kinds, and the file of a collection that has their objects."""
OPERATOR_POD = "dynamo-operator"
Outcome = tuple[str, str, str]
"""Result (PASS, WARN or FAIL), check and detail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceConfig:
    """Collect the evidence of one Dynamo resource in a directory. Nothing in the cluster is changed."""

    kind: str | None = option(None, "--kind", None, "Kind of the resource", aliases=("-k",), choices=tuple(KINDS))
    resource: str | None = option(None, "--resource", None, "Name of the resource", aliases=("-r",))
    namespace: str = option("default", "--namespace", "KUBECTL_NAMESPACE", "Namespace", aliases=("-n",))
    output: str | None = option(None, "--output", None, "Directory to write; it is created", aliases=("-o",))

    def __post_init__(self) -> None:
        for flag, value in (("-k", self.kind), ("-r", self.resource), ("-o", self.output)):
            if not value:
                raise ConfigError(f"{flag}: missing; usage: -k {'|'.join(KINDS)} -r NAME [-n NAMESPACE] -o DIR")


def main() -> None:
    """Run the command; exit with 2 for a wrong option, with 1 if a part could not be collected."""
    exit_on_config_error(lambda: collect_evidence(sys.argv[1:]))


def collect_evidence(argv: Sequence[str]) -> int:
    """Collect, write the files and print the summary. Raise `ConfigError`."""
    config = load(EvidenceConfig, argv, prog="collect-evidence.sh")
    kind, name, output = config.kind or "", config.resource or "", config.output or ""
    from dynamo.ops.troubleshoot.cluster import namespace_files

    try:
        files, _, problems = asyncio.run(namespace_files(config.namespace, name))
    except ConfigError:
        raise
    except DynamoException as error:
        raise StartupError(str(error)) from None
    found = evidence_files(files, kind, name)
    outcomes = outcomes_of(files, found, kind, name, problems)
    directory = Path(output)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file, text in found.items():
            (directory / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"-o {output}: {error.strerror or error}") from None
    print(summary(outcomes, output))
    return int(any(result == "FAIL" for result, _, _ in outcomes))


def resource_of(files: Mapping[str, str], kind: str, name: str) -> KubeObject | None:
    """Return the resource, or None if the collection does not have it."""
    objects = items_of(files.get(KINDS[kind], ""))
    return next((one for one in objects if part(one, "metadata").get("name") == name), None)


def evidence_files(files: Mapping[str, str], kind: str, name: str) -> dict[str, str]:
    """Return the files by upstream's names. Pure."""
    found: dict[str, str] = {}
    resource = resource_of(files, kind, name)
    if resource is not None:
        found[f"{name}.yaml"] = yaml.safe_dump(resource, sort_keys=False)
        found["conditions.txt"] = json.dumps(part(resource, "status").get("conditions") or [], indent=2) + "\n"
    pods, events = items_of(files.get("pods.json", "")), items_of(files.get("events.json", ""))
    found["pods.txt"] = "".join(_pod_lines(pods))
    found["events.txt"] = "".join(_event_line(one) for one in events)
    for pod in pods:
        own = str(part(pod, "metadata").get("name"))
        about = [one for one in events if part(one, "involvedObject").get("name") == own]
        found[f"describe-{own}.txt"] = yaml.safe_dump(pod, sort_keys=False) + "".join(map(_event_line, about))
    for file, text in sorted(files.items()):
        parts = file.removesuffix(".log").split("/")
        if parts[0] == "pods" and len(parts) == 3:
            _, pod_name, container = parts
            target = "operator.log" if OPERATOR_POD in pod_name else f"logs-{pod_name}.txt"
            if container.endswith("-previous") and target != "operator.log":
                target = f"logs-{pod_name}-previous.txt"
            found[target] = f"{found.get(target, '')}===== {container} =====\n{text.rstrip()}\n"
    return found


def outcomes_of(
    files: Mapping[str, str], found: Mapping[str, str], kind: str, name: str, problems: Sequence[str]
) -> list[Outcome]:
    """Return a row for each part: a missing resource fails, other missing parts are warnings. Pure."""
    has_resource = f"{name}.yaml" in found
    logs = sum(file.startswith("logs-") for file in found)
    pods = len(items_of(files.get("pods.json", "")))
    return [
        (
            "PASS" if has_resource else "FAIL",
            "resource",
            f"{kind}/{name} {'collected' if has_resource else 'not found'}",
        ),
        ("PASS" if pods else "WARN", "pods", f"{pods} pods"),
        ("PASS" if logs else "WARN", "logs", f"{logs} log files"),
        ("PASS" if found["events.txt"] else "WARN", "events", f"{found['events.txt'].count(chr(10))} events"),
        ("PASS" if "operator.log" in found else "WARN", "operator", "log of the operator"),
        *(("WARN", "read", problem) for problem in problems),
    ]


def summary(outcomes: Sequence[Outcome], output: str) -> str:
    """Return the footer of the collection. Pure."""
    counts = {result: sum(one[0] == result for one in outcomes) for result in ("PASS", "FAIL", "WARN")}
    return "\n".join(
        [
            "===== Collection Summary =====",
            *("|".join(one) for one in outcomes),
            f"Output: {output}",
            f"Passed: {counts['PASS']}  Failed: {counts['FAIL']}  Warned: {counts['WARN']}",
            f"Next: dynamo troubleshoot --bundle {output}; see references/symptom-signatures.md",
        ]
    )


def _pod_lines(pods: Sequence[KubeObject]) -> Iterator[str]:
    for pod in pods:
        status = part(pod, "status")
        states = [one for one in status.get("containerStatuses") or () if isinstance(one, dict)]
        ready, restarts = (
            sum(bool(one.get("ready")) for one in states),
            sum(int(one.get("restartCount") or 0) for one in states),
        )
        name, node = part(pod, "metadata").get("name"), part(pod, "spec").get("nodeName") or "-"
        yield f"{name}  {ready}/{len(states)}  {status.get('phase') or 'Unknown'}  {restarts}  {node}\n"


def _event_line(event: KubeObject) -> str:
    subject = part(event, "involvedObject")
    text = " ".join(str(event.get("message") or "").split())
    when = event.get("lastTimestamp") or event.get("eventTime") or "-"
    return f"{when}  {event.get('type') or 'Normal'}  {event.get('reason')}  {subject.get('kind')}/{subject.get('name')}  {text}\n"


if __name__ == "__main__":
    main()
