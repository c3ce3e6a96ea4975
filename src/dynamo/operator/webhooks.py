"""Webhook server of the operator: validation, defaults and conversion over TLS, with certificates that renew themselves.

    webhooks = WebhookServer(client, WebhookSettings(namespace="dynamo-system"))
    await webhooks.start(bind("0.0.0.0", 9443, "--webhook-port")); ...; await webhooks.close()

The certificates are in a secret that all replicas of the operator share. The authority's certificate is written into the
webhook configurations and the resource definitions, again at each check, so that replacing these heals by itself.
"""

import asyncio
import base64
import logging
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo import __version__
from dynamo.core.boundaries import logged
from dynamo.core.http_server import HttpServer, ServerLimits
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.k8s.client import KubeClient, KubeRefused
from dynamo.k8s.kinds import RESOURCE_DEFINITIONS, SECRETS
from dynamo.operator.certificates import CertificateSet, renewed, service_hosts
from dynamo.operator.reviews import (
    MalformedReview,
    accepting_response,
    conversion_response,
    defaulting_response,
    validation_response,
)
from dynamo.operator.validation.facts import part
from dynamo.operator.webhook_configurations import (
    CONFIGURATIONS,
    FIELD_MANAGER,
    WebhookAddress,
    configurations,
    conversion_patch,
    converted_definitions,
)
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.crds import BY_KIND, CONVERSION_NAMESPACE, CONVERSION_SERVICE

logger = logging.getLogger(__name__)

CERTIFICATES = "webhook-server-cert"
CHECK_S = 3600.0
"""Interval of the checks; much shorter than the time that is left at a renewal."""
RETRY_S = 10.0
"""Interval while the certificates have not been published."""
BODY_BYTES = 16 << 20
"""A conversion review has a whole page of a list; an object has at most 1.5 MiB."""
CONFLICTS = frozenset({404, 409})
REVIEW_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
OPERATIONS = frozenset({"CREATE", "UPDATE", "DELETE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """Settings of the webhook server."""

    namespace: str = CONVERSION_NAMESPACE
    """Namespace of the secret and of the service."""
    service: str = CONVERSION_SERVICE
    has_grove: Callable[[], bool | None] = lambda: None
    """Returns whether graphs run with Grove; None while that is unknown, so that rules which depend on it are not applied."""
    url: str = ""
    """Base URL at which the API server reaches this process; empty: through the service."""
    operator_users: frozenset[str] = frozenset()
    """Names of the callers that are the operator, such as `system:serviceaccount:NAMESPACE:NAME`."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose objects are checked; empty: all."""
    is_excluded: Callable[[str], bool] = lambda _: False
    """Whether another operator checks the objects of a namespace, so that this one accepts them as they are."""
    extra_hosts: tuple[str, ...] = ()
    """Further names and addresses of the server certificate."""
    has_conversion: bool = True
    """Whether the resource definitions are given the conversion webhook."""
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))

    @property
    def address(self) -> WebhookAddress:
        """Place at which the API server reaches the webhooks."""
        return WebhookAddress(self.service, self.namespace, self.url)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names and addresses of the server certificate."""
        host = urlsplit(self.url).hostname
        return (*service_hosts(self.service, self.namespace), *([host] if host else []), *self.extra_hosts)


class WebhookServer:
    """Serves the webhooks and keeps their certificates valid and published."""

    def __init__(self, client: KubeClient, settings: WebhookSettings, metrics: MetricsRegistry | None = None) -> None:
        registry = metrics or MetricsRegistry()
        self._reviews = registry.histogram(
            "dynamo_operator_review_duration_seconds",
            "Duration of reviews: validation, defaults and conversion",
            ("webhook",),
            REVIEW_BUCKETS,
        )
        labels = ("resource_type", "operation")
        self._duration = registry.histogram(
            "dynamo_operator_webhook_duration_seconds", "Duration of validations", labels, REVIEW_BUCKETS
        )
        self._requests = registry.counter("dynamo_operator_webhook_requests_total", "Validations", (*labels, "result"))
        self._denials = registry.counter(
            "dynamo_operator_webhook_denials_total", "Objects that the validating webhook refused", (*labels, "reason")
        )
        self._client = client
        self._settings = settings
        self._tasks = TaskOwner("webhooks")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._loaded: CertificateSet | None = None
        self.http = HttpServer(self._application(), ServerLimits(body_bytes=BODY_BYTES))

    @property
    def is_ready(self) -> bool:
        """Whether the server has a certificate."""
        return self._loaded is not None

    async def start(self, listener: socket.socket) -> None:
        """Serve, publish the certificates, and check them every hour. Raise what the API server refuses.

        Serving comes first: from the publication on, the API server refuses objects that it cannot have checked.
        """
        pair = await self._load()
        await self.http.start(listener, self._context)
        await self._publish(base64.b64encode(pair.authority).decode())
        self._tasks.start(self._keep(), "certificates")

    async def close(self) -> None:
        """Stop the checks and the server."""
        await self._tasks.cancel_and_wait()
        await self.http.close()

    async def _keep(self) -> None:
        wait_s = CHECK_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = RETRY_S  # Kept if the check fails.
            with logged(logger, "failed to check the webhook certificates; trying again in %g s", RETRY_S):
                await self.check()
                wait_s = CHECK_S

    async def check(self) -> None:
        """Renew the certificates if they are due, use them for new connections, and publish their authority."""
        pair = await self._load()
        await self._publish(base64.b64encode(pair.authority).decode())

    async def _load(self) -> CertificateSet:
        pair = await self._current()
        if pair != self._loaded:
            await asyncio.to_thread(load_certificate, self._context, pair)
            self._loaded = pair
            logger.info("webhook certificate loaded")
        return pair

    async def _current(self) -> CertificateSet:
        """Return the certificates of the secret, renewed if they are due; another replica may have been faster."""
        settings = self._settings
        for _ in range(3):
            stored = await self._client.get(SECRETS, CERTIFICATES, settings.namespace)
            old = None if stored is None else CertificateSet.from_data(decoded(stored.get("data")))
            pair = await asyncio.to_thread(renewed, old, settings.hosts, settings.now())
            if pair == old:
                return pair
            try:
                await self._store(pair, stored)
            except KubeRefused as error:
                if error.code not in CONFLICTS:
                    raise
                continue
            return pair
        raise KubeRefused(409, "Conflict", f"secret {settings.namespace}/{CERTIFICATES} changes continuously")

    async def _store(self, pair: CertificateSet, stored: KubeObject | None) -> None:
        data = {name: base64.b64encode(one).decode() for name, one in pair.data().items()}
        namespace = self._settings.namespace
        if stored is None:
            metadata = {"name": CERTIFICATES, "namespace": namespace}
            value = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}
            await self._client.create(SECRETS, value, namespace)
            return
        revision = {"resourceVersion": stored["metadata"]["resourceVersion"]}
        await self._client.patch(SECRETS, CERTIFICATES, {"metadata": revision, "data": data}, namespace)

    async def _publish(self, bundle: str) -> None:
        """Write the authority's certificate where the API server reads it; write nothing that is already there."""
        settings = self._settings
        for value in configurations(settings.address, bundle, settings.namespaces):
            kind = CONFIGURATIONS[value["kind"]]
            stored = await self._client.get(kind, value["metadata"]["name"])
            if stored is None or not has_values(stored, value):
                await self._client.apply(kind, value, manager=FIELD_MANAGER)
        if not settings.has_conversion:
            return
        patch = conversion_patch(settings.address, bundle)
        for name in converted_definitions():
            stored = await self._client.get(RESOURCE_DEFINITIONS, name)
            if stored is None:
                logger.warning("resource definition %s is not installed; apply deploy/crds", name)
            elif settings.namespaces and is_converted_by_other(stored, patch):
                continue  # Definitions are the cluster's: its operator converts.
            elif not has_values(stored, patch):
                await self._client.patch(RESOURCE_DEFINITIONS, name, patch)

    def _application(self) -> Starlette:
        post = ["POST"]
        return Starlette(
            routes=[
                Route("/validate{kind:path}", self._validate, methods=post),
                Route("/mutate{kind:path}", self._default, methods=post),
                Route("/convert", self._convert, methods=post),
            ]
        )

    async def _validate(self, request: Request) -> Response:
        settings = self._settings

        def respond(message: Any) -> KubeObject:
            if self._is_excluded(message):
                return accepting_response(message)
            return validation_response(message, has_grove=settings.has_grove(), operator_users=settings.operator_users)

        return await self._reviewed(request, "validate", respond)

    async def _default(self, request: Request) -> Response:
        def respond(message: Any) -> KubeObject:
            if self._is_excluded(message):
                return accepting_response(message)
            return defaulting_response(message, operator_version=__version__)

        return await self._reviewed(request, "mutate", respond)

    def _is_excluded(self, message: Any) -> bool:
        return self._settings.is_excluded(str(part(message, "request").get("namespace") or ""))

    async def _convert(self, request: Request) -> Response:
        return await self._reviewed(request, "convert", conversion_response)

    async def _reviewed(self, request: Request, webhook: str, respond: Callable[[Any], KubeObject]) -> Response:
        began = time.perf_counter()
        try:
            message = msgspec.json.decode(await request.body())
            answer = respond(message)
        except (msgspec.DecodeError, MalformedReview) as error:
            return Response(f"malformed review: {error}", 400, media_type="text/plain")
        body = msgspec.json.encode(answer)
        took_s = time.perf_counter() - began
        self._reviews.labels(webhook=webhook).observe(took_s)
        if webhook == "validate":
            self._count_validation(message, answer["response"], took_s)
        return Response(body, media_type="application/json")

    def _count_validation(self, message: KubeObject, response: KubeObject, took_s: float) -> None:
        """Count an admission under upstream's names, which are those of its validators."""
        operation = str(part(message, "request").get("operation") or "")
        labels = {
            "resource_type": resource_type(message),
            "operation": operation if operation in OPERATIONS else "other",
        }
        is_allowed = response.get("allowed") is not False
        self._duration.labels(**labels).observe(took_s)
        self._requests.labels(**labels, result="allowed" if is_allowed else "denied").inc()
        if not is_allowed:
            self._denials.labels(**labels, reason="validation").inc()


def is_converted_by_other(definition: KubeObject, patch: KubeObject) -> bool:
    """Return whether the webhook of another service, whose certificate is published, converts a resource definition."""
    client, own = (part(one, "spec", "conversion", "webhook", "clientConfig") for one in (definition, patch))
    return bool(client.get("caBundle")) and client.get("service") != own["service"]


def resource_type(message: KubeObject) -> str:
    """Return the kind that a review is about; `other` for one that is not of the group, so that labels stay few."""
    objects = [part(message, "request").get("object"), *(part(message, "request").get("objects") or ())]
    kind = next((str(one.get("kind")) for one in objects if isinstance(one, dict)), "")
    return kind if kind in BY_KIND else "other"


def load_certificate(context: ssl.SSLContext, pair: CertificateSet) -> None:
    """Use a certificate for new connections. The ssl module reads files only; they exist for this call, privately."""
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
        certificate.write_bytes(pair.certificate)
        key.touch(mode=0o600)
        key.write_bytes(pair.key)
        context.load_cert_chain(os.fspath(certificate), os.fspath(key))


def decoded(data: Any) -> dict[str, bytes]:
    """Return the entries of a secret; an entry that is not base64 is left out."""
    found: dict[str, bytes] = {}
    for name, text in (data or {}).items():
        try:
            found[name] = base64.b64decode(text)
        except ValueError:
            continue
    return found


def has_values(stored: Any, wanted: Any) -> bool:
    """Return whether an object has all fields of another one with their values; it may have more."""
    if isinstance(wanted, dict):
        return isinstance(stored, dict) and all(has_values(stored.get(name), one) for name, one in wanted.items())
    if isinstance(wanted, list):
        items: Iterable[Any] = stored if isinstance(stored, list) and len(stored) == len(wanted) else ()
        return bool(items) == bool(wanted) and all(
            has_values(one, other) for one, other in zip(items, wanted, strict=True)
        )
    return bool(stored == wanted)


async def remove_webhooks(client: KubeClient, settings: WebhookSettings) -> None:
    """Delete the webhook configurations and switch conversion off, so that the API server works without the operator.

    Raise what the API server refuses.
    """
    for value in configurations(settings.address, "", settings.namespaces):
        name = value["metadata"]["name"]
        await client.delete(CONFIGURATIONS[value["kind"]], name)
        logger.info("webhook configuration %s removed", name)
    for name in converted_definitions():
        stored = await client.get(RESOURCE_DEFINITIONS, name)
        address = part(part(part(part(stored or {}, "spec"), "conversion"), "webhook"), "clientConfig")
        is_own = part(address, "service").get("namespace") == settings.namespace
        if is_own or (settings.url and str(address.get("url") or "").startswith(settings.url)):
            await client.patch(
                RESOURCE_DEFINITIONS, name, {"spec": {"conversion": {"strategy": "None", "webhook": None}}}
            )
            logger.info("conversion of %s switched off", name)
