"""Checks of ports, discovery, etcd, NATS, Kubernetes, variables and clocks. Pure."""

from collections.abc import Iterator, Mapping

from dynamo.core.known_variables import UPSTREAM_ONLY, is_known, nearest
from dynamo.ops.doctor.facts import (
    ApiServerFacts,
    ClockFacts,
    DirectoryFacts,
    FrontendFacts,
    MachineFacts,
    PortFacts,
    ServiceFacts,
)
from dynamo.ops.doctor.package_checks import shortened
from dynamo.ops.report import CheckRow, failed, passed, skipped, warned

SLOW_MS = 500.0  # A healthy etcd or NATS in the same network responds in a few milliseconds.
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 300.0
"""Clock differences: log lines of several hosts cannot be ordered; certificates and tokens are refused."""
VARIABLES_MAX = 20  # Rows for unknown variables; a generated environment may have hundreds.


def service_rows(facts: MachineFacts) -> Iterator[CheckRow]:
    """Yield the rows of everything that processes connect to, and of their settings."""
    yield from variable_rows(facts.variables, facts.settings_error)
    for port in facts.ports:
        yield port_row(port, facts.frontend)
    yield frontend_row(facts.frontend)
    yield discovery_row(facts.directory, facts.backend)
    yield from server_rows(facts.services)
    yield cluster_row(facts.cluster)
    yield from clock_rows(facts.clocks)


def variable_rows(variables: Mapping[str, str], error: str = "") -> Iterator[CheckRow]:
    """Yield a row for a wrong value, and one for each DYN_ variable that no component reads."""
    if error:
        yield failed("settings", error, "correct or unset the variable; docs/reference/variables.md lists all of them")
    own = sorted(name for name in variables if name.startswith("DYN_"))
    unknown = [name for name in own if not is_known(name)]
    for name in unknown[:VARIABLES_MAX]:
        if name in UPSTREAM_ONLY:
            yield warned("variables", f"{name}: has no effect in this implementation", "unset it")
            continue
        near = nearest(name)
        remedy = f"did you mean {near}?" if near else "unset it; docs/reference/variables.md lists all variables"
        yield warned("variables", f"{name}: no component reads this variable", remedy)
    if len(unknown) > VARIABLES_MAX:
        yield warned("variables", f"{len(unknown) - VARIABLES_MAX} more unknown DYN_ variables", "unset them")
    if not unknown and not error:
        yield passed("variables", f"{len(own)} DYN_ variables are set" + (f": {shortened(own)}" if own else ""))


def port_row(facts: PortFacts, frontend: FrontendFacts | None) -> CheckRow:
    """Return the row of one port."""
    name = f"port {facts.port}"
    use = f"{facts.setting}, {facts.host}:{facts.port}"
    if not facts.error:
        return passed(name, f"free ({use})")
    if facts.is_dynamo:
        url = frontend.url if frontend else f"port {facts.port}"
        return passed(name, f"in use by a Dynamo frontend at {url}{_by(facts.owner)}; another one needs its own port")
    evidence = f"in use{_by(facts.owner)} ({use})" if facts.is_in_use else f"{facts.error} ({use})"
    if not facts.is_needed:
        return warned(name, evidence, f"not used with the present settings; needed if {facts.setting} is this port")
    flag = "--http-port PORT or DYN_HTTP_PORT" if "HTTP" in facts.setting else facts.setting
    return failed(name, evidence, f"end that process, or choose another port with {flag}")


def _by(owner: str) -> str:
    return f" by {owner}" if owner else ""


def frontend_row(facts: FrontendFacts | None) -> CheckRow:
    """Return the row of a frontend that runs on this machine."""
    if facts is None:
        return skipped("frontend", "none runs at the configured address")
    if facts.status != "healthy":
        return failed(
            "frontend", f"{facts.url}: /health reports {facts.status or 'nothing'}", "run: dynamo troubleshoot"
        )
    if facts.needs_key:
        return passed("frontend", f"{facts.url}: healthy; it requires an API key (DYN_API_KEY) to list its models")
    if not facts.models:
        return warned(
            "frontend",
            f"{facts.url}: healthy, but no worker has registered a model",
            "start a worker with the same discovery settings; dynamo troubleshoot reads its log",
        )
    return passed("frontend", f"{facts.url}: healthy, {facts.instances} instances, models: {shortened(facts.models)}")


def discovery_row(facts: DirectoryFacts | None, backend: str) -> CheckRow:
    """Return the row of the discovery directory."""
    if facts is None:
        return skipped("discovery", f"no directory: the backend is {backend or 'not known'}")
    name = "DYN_FILE_KV" if facts.is_named else "default of DYN_FILE_KV"
    where = f"{facts.path} ({name})"
    if facts.problem:
        return failed("discovery", facts.problem, f"processes refuse this directory; {_directory_remedy(facts)}")
    if not facts.is_writable:
        return failed("discovery", f"{where}: not writable by this user", _directory_remedy(facts))
    if not facts.exists:
        return passed("discovery", f"{where} does not exist; the first process creates it")
    if facts.foreign:
        return warned(
            "discovery",
            f"{where}: records of other users are ignored: {shortened(facts.foreign)}",
            "run all processes as one user, or remove these files",
        )
    if facts.unreadable:
        return warned("discovery", f"{where}: no records: {shortened(facts.unreadable)}", "remove these files")
    if facts.stale:
        return warned(
            "discovery",
            f"{where}: {facts.live} live records; stale: {shortened(facts.stale)}",
            "their processes ended or are paused; a running process ignores them and removes them after a minute",
        )
    return passed("discovery", f"{where}: {facts.live} live records")


def _directory_remedy(facts: DirectoryFacts) -> str:
    return f"set DYN_FILE_KV to a directory of your own, or: chmod u+rwx,go-w {facts.path} (as its owner)"


def server_rows(services: tuple[ServiceFacts, ...]) -> Iterator[CheckRow]:
    """Yield the rows of etcd and NATS; one that is not configured is skipped."""
    for name in ("etcd", "NATS"):
        own = [one for one in services if one.name == name]
        if not own:
            yield skipped(name, "not configured")
        elif len(own) == 1:
            yield _server(own[0])
        else:
            yield from _members(name, own)


def _server(facts: ServiceFacts) -> CheckRow:
    if facts.error:
        row = failed if facts.is_required else warned
        start = "start it" if facts.is_required else "the present settings do not use it"
        return row(facts.name, f"{facts.address}: {facts.error}", f"{start}, or correct {facts.setting}")
    evidence = f"{facts.address}: responded in {facts.elapsed_ms:.0f} ms"
    if facts.elapsed_ms > SLOW_MS:
        return warned(facts.name, evidence, "check its disk and the network; slow answers delay registrations")
    return passed(facts.name, evidence)


def _members(name: str, own: list[ServiceFacts]) -> Iterator[CheckRow]:
    down = [one for one in own if one.error]
    if down and len(down) < len(own):
        listed = "; ".join(f"{one.address}: {one.error}" for one in down)
        remedy = "processes use the other members; restart these"
        yield warned(name, f"{len(own) - len(down)} of {len(own)} members respond; {listed}", remedy)
    elif down:
        listed = "; ".join(f"{one.address}: {one.error}" for one in down)
        yield failed(name, f"no member responds: {listed}", f"start them, or correct {own[0].setting}")
    else:
        yield passed(name, f"{len(own)} members respond")


def cluster_row(facts: ApiServerFacts | None) -> CheckRow:
    """Return the row of access to Kubernetes."""
    if facts is None:
        return skipped("Kubernetes", "not configured (KUBECONFIG, ~/.kube/config or a service account)")
    bad = failed if facts.is_required or facts.source == "KUBECONFIG" else warned
    where = f"{facts.address or 'cluster'} ({facts.source}), namespace {facts.namespace or 'default'}"
    if facts.error:
        return bad("Kubernetes", facts.error, "correct KUBECONFIG, or check the network; kubectl get --raw /version")
    if facts.pods is None:
        remedy = "grant this user get, list and watch of pods, DynamoWorkerMetadata and EndpointSlices"
        return bad("Kubernetes", f"{where}: cannot list pods: {facts.pods_error}", remedy)
    if facts.is_required and not facts.has_metadata:
        remedy = "run: kubectl apply --server-side -f deploy/crds"
        return failed("Kubernetes", f"{where}: DynamoWorkerMetadata is not installed", remedy)
    if not facts.has_graphs:
        remedy = "to deploy graphs: kubectl apply --server-side -f deploy/crds"
        return warned("Kubernetes", f"{where}: DynamoGraphDeployment is not installed", remedy)
    return passed("Kubernetes", f"{where}: {facts.pods} pods, resource definitions installed")


def clock_rows(clocks: tuple[ClockFacts, ...]) -> Iterator[CheckRow]:
    """Yield a row for each clock that was compared."""
    if not clocks:
        yield skipped("clock", "no server to compare with")
    for one in clocks:
        skew_s = max(0.0, abs(one.skew_s) - one.error_s)
        evidence = f"{one.source} is {abs(one.skew_s):.1f} s {'ahead' if one.skew_s > 0 else 'behind'}"
        remedy = "synchronize the clocks of both hosts (chrony, systemd-timesyncd)"
        if skew_s >= SKEW_FAIL_S:
            yield failed("clock", f"{evidence}: certificates and tokens may be refused", remedy)
        elif skew_s >= SKEW_WARN_S:
            yield warned("clock", evidence, remedy)
        else:
            yield passed("clock", f"{one.source}: within {max(one.error_s, abs(one.skew_s)):.1f} s")
