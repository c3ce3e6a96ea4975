"""Collector of ports, frontends, etcd, NATS, Kubernetes and clocks; every request has a deadline."""

import asyncio
import contextlib
import dataclasses
import email.utils
import errno
import json
import os
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

from dynamo.core.errors import ConfigError, DynamoException
from dynamo.core.hosts import is_loopback
from dynamo.core.http_client import BlockingHttpClient, Deadlines
from dynamo.k8s.client import KubeClient
from dynamo.k8s.kinds import PODS
from dynamo.ops.doctor.facts import ApiServerFacts, ClockFacts, FrontendFacts, PortFacts, ServiceFacts
from dynamo.ops.doctor.sockets import listener_of
from dynamo.protocols.kubernetes.common import V1ALPHA1, V1BETA1
from dynamo.runtime.config import nats_options
from dynamo.runtime.transports.etcd.client import EtcdMember
from dynamo.runtime.transports.etcd.options import Address, etcd_options
from dynamo.runtime.transports.etcd.protocol import EtcdRefused, EtcdUnavailable
from dynamo.runtime.transports.nats.connection import NatsConnection

DEADLINE_S = 3.0
DEADLINES = Deadlines(connect_s=1.0, first_s=DEADLINE_S, between_s=DEADLINE_S, whole_s=DEADLINE_S)
BODY_BYTES_MAX = 8 << 20
ANY_HOSTS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared with, not bound


def port_facts(setting: str, host: str, port: int, *, is_needed: bool) -> PortFacts:
    """Return whether this process can listen on a port; the socket is closed at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    free = PortFacts(setting=setting, host=host, port=port, is_needed=is_needed)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except (OSError, OverflowError) as error:
            number = error.errno if isinstance(error, OSError) else None
            is_in_use = number == errno.EADDRINUSE
            reason = os.strerror(number) if number and number > 0 else str(error)
            owner = listener_of(port) if is_in_use else ""
            return dataclasses.replace(free, error=reason, is_in_use=is_in_use, owner=owner)
    return free


def frontend_facts(
    host: str, port: int, variables: Mapping[str, str]
) -> tuple[FrontendFacts | None, ClockFacts | None]:
    """Return the facts about a frontend that answers on a port, and its clock; None if no frontend answers."""
    name = "127.0.0.1" if host in ANY_HOSTS or is_loopback(host) else host
    scheme = "https" if variables.get("DYN_TLS_CERT_PATH") else "http"
    url = f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}"
    sent = time.time()
    status, headers, health = fetch(url, "/health")
    clock = clock_of(f"frontend {url}", headers, sent, time.time())
    value = _object(health)
    if status not in {200, 503} or "status" not in value:
        return None, None
    listing_status, _, listing = fetch(url, "/v1/models", variables.get("DYN_API_KEY", ""))
    models = _object(listing).get("data")
    _, _, document = fetch(url, "/openapi.json")
    info = _object(document).get("info")
    facts = FrontendFacts(
        url=url,
        status=str(value["status"]),
        version=str(info.get("version") or "") if isinstance(info, dict) else "",
        models=tuple(str(one.get("id")) for one in models if isinstance(one, dict)) if isinstance(models, list) else (),
        needs_key=listing_status in {401, 403},
        instances=len(value.get("instances") or ()),
    )
    return facts, clock


def fetch(url: str, path: str, key: str = "") -> tuple[int, Mapping[str, str], str]:
    """Return status, headers and body of a GET request; status 0 without a response."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    tls = ssl.create_default_context() if url.startswith("https") else None
    if tls is not None:  # The certificate names the public host, not this machine; without a check no key is sent.
        tls.check_hostname, headers = False, {}
        tls.verify_mode = ssl.CERT_NONE
    try:
        with BlockingHttpClient(url, DEADLINES, tls=tls, headers=headers).request("GET", path) as response:
            return response.status, response.headers, response.read(BODY_BYTES_MAX).decode(errors="replace")
    except (DynamoException, OSError, ValueError):
        return 0, {}, ""


def clock_of(source: str, headers: Mapping[str, str], sent: float, received: float) -> ClockFacts | None:
    """Return the skew of the clock that wrote the `Date` header; None without one. The header has whole seconds."""
    try:
        other = email.utils.parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (TypeError, ValueError):
        return None
    error_s = 0.5 + (received - sent) / 2
    return ClockFacts(source=source, skew_s=other + 0.5 - (sent + received) / 2, error_s=error_s)


async def etcd_facts(variables: Mapping[str, str], *, is_required: bool) -> tuple[list[ServiceFacts], list[ClockFacts]]:
    """Return the facts about each member of etcd, and their clocks."""
    try:
        options = etcd_options(variables)
        tls = options.tls()
    except ConfigError as error:
        given = variables.get("ETCD_ENDPOINTS", "")
        return [ServiceFacts(name="etcd", setting="ETCD_ENDPOINTS", address=given, error=str(error))], []

    async def member(address: Address) -> ServiceFacts:
        own = EtcdMember(address, options, tls, DEADLINE_S)
        begun = time.perf_counter()
        reason = ""
        try:
            await own.connect()
            await own.probe(b"v1/")
        except (EtcdUnavailable, EtcdRefused, ssl.SSLError) as error:
            reason = str(error)
        finally:
            own.close()
        elapsed_ms = (time.perf_counter() - begun) * 1e3
        return ServiceFacts(
            name="etcd", setting="ETCD_ENDPOINTS", address=str(address), error=reason, elapsed_ms=elapsed_ms,
            is_required=is_required,
        )  # fmt: skip

    found = list(await asyncio.gather(*(member(one) for one in options.addresses)))
    clocks = []
    for one in found:
        if not one.error and one.address.startswith("http:"):
            sent = time.time()
            _, headers, _ = await asyncio.to_thread(fetch, one.address, "/version")
            clock = clock_of(f"etcd {one.address}", headers, sent, time.time())
            clocks += [clock] if clock else []
    return found, clocks


async def nats_facts(variables: Mapping[str, str], *, is_required: bool) -> ServiceFacts:
    """Return the facts about the NATS server: whether it accepts a connection with the configured credentials."""
    facts = ServiceFacts(
        name="NATS", setting="NATS_SERVER", address=variables.get("NATS_SERVER", ""), is_required=is_required
    )
    begun = time.perf_counter()
    try:
        options = dataclasses.replace(nats_options(variables=variables), startup_timeout_s=DEADLINE_S)
        facts = dataclasses.replace(facts, address=options.where)
        connection = NatsConnection(options, "doctor")
        try:
            await connection.start()
        finally:
            await connection.close()
    except DynamoException as error:
        return dataclasses.replace(facts, error=str(error))
    return dataclasses.replace(facts, elapsed_ms=(time.perf_counter() - begun) * 1e3)


async def cluster_facts(variables: Mapping[str, str], *, is_required: bool) -> ApiServerFacts | None:
    """Return the facts about the Kubernetes cluster; None if none is configured."""
    source = cluster_source(variables)
    if not source and not is_required:
        return None
    facts = ApiServerFacts(source=source or "no configuration", is_required=is_required)
    try:
        async with asyncio.timeout(DEADLINE_S * 2):
            client = KubeClient()
            try:
                return await _examine(client, facts)
            finally:
                await client.close()
    except TimeoutError:
        return dataclasses.replace(facts, error=f"{source}: no response within {DEADLINE_S * 2:g} s")
    except DynamoException as error:
        return dataclasses.replace(facts, error=str(error))


async def _examine(client: KubeClient, facts: ApiServerFacts) -> ApiServerFacts:
    namespace = client.namespace or "default"
    graphs = await client.discover(V1BETA1, "DynamoGraphDeployment")
    metadata = await client.discover(V1ALPHA1, "DynamoWorkerMetadata")
    facts = dataclasses.replace(
        facts, address=client.address, namespace=namespace, has_graphs=graphs is not None,
        has_metadata=metadata is not None,
    )  # fmt: skip
    try:
        return dataclasses.replace(facts, pods=len((await client.list(PODS, namespace)).items))
    except DynamoException as error:
        return dataclasses.replace(facts, pods_error=str(error))


def cluster_source(variables: Mapping[str, str]) -> str:
    """Return what names a cluster; empty if nothing does."""
    if variables.get("KUBECONFIG"):
        return "KUBECONFIG"
    if variables.get("KUBERNETES_SERVICE_HOST"):
        return "service account"
    return "~/.kube/config" if os.path.exists(os.path.expanduser("~/.kube/config")) else ""


def _object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}
