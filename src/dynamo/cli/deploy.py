"""Kubernetes deployments: `dynamo deploy validate`, `render`, `diff`, `apply`, `status`, `logs` and `delete`."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from dynamo.cli import cluster
from dynamo.cli.manifests import Manifest, check_manifests, print_skipped, read_files, read_manifests, rendered
from dynamo.cli.object_status import is_kind
from dynamo.cli.verbs import run_verb
from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import OperatorSettings
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.validation.facts import AdmissionFacts

HELP = """\
dynamo deploy: graphs on Kubernetes, from manifests; KUBECONFIG or ~/.kube/config names the cluster

  dynamo deploy validate FILE...      check schemas and admission rules, without a cluster; exit status 1 if refused
  dynamo deploy render FILE...        print the objects that a graph requires, without a cluster
  dynamo deploy diff FILE...          show what apply would change; exit status 1 if there is a difference
  dynamo deploy apply FILE...         check, then create or update the objects
  dynamo deploy status [KIND/]NAME    a graph's components: ready replicas, phase, last event, why not ready; of a
                                      request, model or checkpoint: phase, conditions, next step
  dynamo deploy logs [KIND/]NAME      the last lines of a graph's containers, or of those of a job; --follow
  dynamo deploy delete FILE...|NAME   delete the objects of the files, or the graph; KIND/NAME another object

  KIND is dgd, dgdr, dm or dckpt; without it, the first of these kinds that has an object of the name is taken.
  FILE may be a directory, or - for the standard input. Options follow the files. --help after a command lists them.
"""
GROVE = ("auto", "yes", "no")


class PlainDumper(yaml.SafeDumper):
    """Writes parts that occur several times in full each time."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True: no part is written as a reference to another."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateConfig:
    """Check manifests by the schemas and the admission rules, without a cluster."""

    grove: str = option(
        "auto", "--grove", None, "Apply the rules of clusters with (yes) or without (no) Grove; auto: neither"
    )

    def __post_init__(self) -> None:
        if self.grove not in GROVE:
            raise ConfigError(f"--grove {self.grove}: must be {', '.join(GROVE)}")

    @property
    def facts(self) -> AdmissionFacts:
        """Facts about the cluster."""
        return AdmissionFacts(has_grove={"yes": True, "no": False}.get(self.grove), may_exist=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderConfig:
    """Print the objects that graphs require, without a cluster."""

    namespace: str = option("default", "--namespace", None, "Namespace of objects that do not name one")
    nats_address: str = option("", "--nats-address", None, "NATS server of the processes")
    etcd_endpoints: str = option("", "--etcd-endpoints", None, "etcd of the processes; default: Kubernetes discovery")
    prometheus_endpoint: str = option("", "--prometheus-endpoint", None, "Prometheus server that planners read")
    grove: bool = option(False, "--grove", None, "Render for a cluster with Grove; otherwise with LeaderWorkerSet")
    gang_scheduler: str = option(
        "none", "--gang-scheduler", None, "Scheduler of pods that start together", choices=("none", "kai", "volcano")
    )

    @property
    def cluster_facts(self) -> ClusterFacts:
        """What the cluster has."""
        return ClusterFacts(
            has_grove=self.grove,
            has_lws=True,
            has_kai=self.gang_scheduler == "kai",
            has_volcano=self.gang_scheduler == "volcano",
            has_virtual_services=True,
            has_inference_pools=True,
            has_resource_claims=True,
        )

    @property
    def settings(self) -> OperatorSettings:
        """Services of the cluster."""
        return OperatorSettings(
            discovery_backend="etcd" if self.etcd_endpoints else "kubernetes",
            nats_address=self.nats_address,
            etcd_endpoints=self.etcd_endpoints,
            prometheus_endpoint=self.prometheus_endpoint,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Compare manifests with the cluster, or delete their objects."""

    namespace: str | None = option(None, "--namespace", None, "Namespace; default: that of the kubeconfig's context")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyConfig:
    """Check manifests, then create or update their objects by server-side apply."""

    namespace: str | None = option(None, "--namespace", None, "Namespace; default: that of the kubeconfig's context")
    force: bool = option(False, "--force", None, "Take over fields that another manager owns")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusConfig:
    """Show the components of a graph, or phase, conditions and next step of a request, model or checkpoint."""

    name: str | None = option(None, "name", None, "NAME, or KIND/NAME with the kind dgd, dgdr, dm or dckpt")
    namespace: str | None = option(None, "--namespace", None, "Namespace; default: that of the kubeconfig's context")
    watch: bool = option(False, "--watch", None, "Repeat until the object is ready or has failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsConfig:
    """Show the last lines of the containers of a graph, or of the job of a request or checkpoint."""

    name: str | None = option(None, "name", None, "NAME, or KIND/NAME with the kind dgd, dgdr or dckpt")
    namespace: str | None = option(None, "--namespace", None, "Namespace; default: that of the kubeconfig's context")
    component: str | None = option(None, "--component", None, "Only this component")
    follow: bool = option(
        False, "--follow", None, "Print new lines too, also of new pods: until interrupted, or until a job has ended"
    )
    tail: int = option(20, "--tail", None, "Number of lines of each container")

    def __post_init__(self) -> None:
        if self.tail < 1:
            raise ConfigError(f"--tail {self.tail}: must be at least 1")


def deploy(argv: Sequence[str]) -> int:
    """Run `dynamo deploy`. Raise `ConfigError` for wrong options and unreadable manifests."""
    return run_verb("dynamo deploy", HELP, VERBS, argv)


def split_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files, which come first, and the options."""
    for at, word in enumerate(argv):
        if word.startswith("-") and word != "-":
            return list(argv[:at]), list(argv[at:])
    return list(argv), []


def validate(argv: Sequence[str]) -> int:
    """Run `dynamo deploy validate`."""
    files, options = split_files(argv)
    config = load(ValidateConfig, options, prog="dynamo deploy validate FILE...")
    found = read_files(files)
    print_skipped(found)
    problems, checked = print_review(found.manifests, config.facts)
    for text in found.problems:
        sys.stderr.write(f"error: {text}\n")
    problems += len(found.problems)
    if not found.manifests and not problems:
        raise ConfigError(f"{' '.join(files)}: no Kubernetes object")
    others, skipped = len(found.manifests) - checked, len(found.skipped)
    unchecked = f"; {others} of other groups not checked" if others else ""
    print(f"{checked} checked, {problems} problems{unchecked}{f'; {skipped} files skipped' if skipped else ''}")
    return 1 if problems else 0


def refused(manifests: Sequence[Manifest], facts: AdmissionFacts) -> bool:
    """Print the problems and warnings of manifests; return whether there is a problem."""
    return bool(print_review(manifests, facts)[0])


def print_review(manifests: Sequence[Manifest], facts: AdmissionFacts) -> tuple[int, int]:
    """Print the problems and warnings of manifests; return the numbers of problems and of checked objects."""
    problems, warnings, checked = check_manifests(manifests, facts)
    for text in warnings:
        sys.stderr.write(f"warning: {text}\n")
    for text in problems:
        sys.stderr.write(f"error: {text}\n")
    return len(problems), checked


def render(argv: Sequence[str]) -> int:
    """Run `dynamo deploy render`; nothing is printed if one object is refused."""
    files, options = split_files(argv)
    config = load(RenderConfig, options, prog="dynamo deploy render FILE...")
    manifests = read_manifests(files)
    if refused(manifests, AdmissionFacts(has_grove=config.grove or None, may_exist=True)):
        return 1
    facts = config.cluster_facts
    try:
        found = [rendered(one, config.settings, config.namespace, facts) for one in manifests]
    except WorkloadError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    for text in (text for one in found for text in one.warnings):
        sys.stderr.write(f"warning: {text}\n")
    objects = [made for one in found for made in one.objects]
    print(yaml.dump_all(objects, Dumper=PlainDumper, sort_keys=False, width=120), end="")
    return 0


def diff(argv: Sequence[str]) -> int:
    """Run `dynamo deploy diff`."""
    files, options = split_files(argv)
    config = load(ClusterConfig, options, prog="dynamo deploy diff FILE...")
    return asyncio.run(cluster.diff(read_manifests(files), config.namespace))


def apply(argv: Sequence[str]) -> int:
    """Run `dynamo deploy apply`; nothing is applied if one object is refused."""
    files, options = split_files(argv)
    config = load(ApplyConfig, options, prog="dynamo deploy apply FILE...")
    manifests = read_manifests(files)
    if refused(manifests, AdmissionFacts(may_exist=True)):
        return 1
    return asyncio.run(cluster.apply(manifests, config.namespace, is_forced=config.force))


def status(argv: Sequence[str]) -> int:
    """Run `dynamo deploy status`."""
    config = load(StatusConfig, argv, prog="dynamo deploy status")
    return asyncio.run(cluster.status(named(config.name), config.namespace, is_repeated=config.watch))


def logs(argv: Sequence[str]) -> int:
    """Run `dynamo deploy logs`."""
    config = load(LogsConfig, argv, prog="dynamo deploy logs")
    return asyncio.run(
        cluster.logs(
            named(config.name),
            config.namespace,
            component=config.component,
            lines=config.tail,
            is_followed=config.follow,
        )
    )


def delete(argv: Sequence[str]) -> int:
    """Run `dynamo deploy delete`: a single word that is no file and has no suffix is `NAME` or `KIND/NAME`."""
    files, options = split_files(argv)
    config = load(ClusterConfig, options, prog="dynamo deploy delete FILE...|[KIND/]NAME")
    if len(files) == 1 and is_target(files[0]):
        return asyncio.run(cluster.delete_object(files[0], config.namespace))
    return asyncio.run(cluster.delete(read_manifests(files), config.namespace))


def is_target(word: str) -> bool:
    """Return whether a word names an object: `NAME`, or `KIND/NAME` with one of the kinds, where there is no such file."""
    kind, has_kind, name = word.partition("/")
    if word == "-" or "." in word or "/" in name:
        return False
    return not has_kind or (is_kind(kind) and not Path(word).exists())


def named(name: str | None) -> str:
    """Return the name of an object. Raise `ConfigError` if it is missing."""
    if not name:
        raise ConfigError("NAME: expected the name of a DynamoGraphDeployment, or KIND/NAME")
    return name


VERBS = {
    "validate": validate,
    "render": render,
    "diff": diff,
    "apply": apply,
    "status": status,
    "logs": logs,
    "delete": delete,
}
