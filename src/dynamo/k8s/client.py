"""Requests to a Kubernetes API server: reads, writes, watches, and the logs of pods.

Objects are JSON data (`KubeObject`). Every request has a deadline; a watch is ended by the server after `WATCH_S`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec

from dynamo.core.codec import json_encode
from dynamo.core.errors import CannotConnect, Disconnected, DynamoException, ResponseTimeout, WorkerUnavailable
from dynamo.core.http_client import Deadlines, HttpResponse
from dynamo.k8s.connection import ApiConnection
from dynamo.k8s.credentials import CredentialsUnavailable
from dynamo.k8s.kinds import PODS, ObjectKind
from dynamo.k8s.kubeconfig import cluster_access
from dynamo.protocols.kubernetes.common import KubeObject

REQUEST_S = 10.0
WATCH_S = 300
"""Duration of one watch. The server ends it then, so that a connection that died unnoticed is found."""
WATCH_MARGIN_S = 30.0
DEADLINES = Deadlines(connect_s=REQUEST_S, first_s=REQUEST_S, between_s=REQUEST_S)
WATCH_DEADLINES = Deadlines(connect_s=REQUEST_S, first_s=REQUEST_S, between_s=WATCH_S + WATCH_MARGIN_S)
LINE_BYTES_MAX = 64 << 20
DEFAULT_NAMESPACE = "default"
PAGE_ITEMS = 500
GONE = 410
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"


class KubeRefused(DynamoException):
    """The API server refused a request."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{f'{code} {reason}'.rstrip()}: {message}")
        self.code = code
        self.reason = reason


class KubeUnavailable(WorkerUnavailable):
    """The API server cannot be reached or does not respond in time."""


class KubeListing(NamedTuple):
    """Objects of a collection at one revision."""

    items: list[KubeObject]
    revision: str


@dataclass(frozen=True, slots=True)
class WatchChange:
    """One change of a collection."""

    type: str
    """`ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`; a bookmark has a revision only."""
    object: KubeObject

    @property
    def revision(self) -> str:
        """The revision at which a watch resumes after this change."""
        revision: str = self.object["metadata"]["resourceVersion"]
        return revision


class KubeClient:
    """Client of one API server."""

    def __init__(self) -> None:
        """Read KUBECONFIG, ~/.kube/config or the service account of the pod. Raise `ConfigError` without any."""
        access = cluster_access()
        self.address = access.cluster.server
        self.namespace = access.namespace or DEFAULT_NAMESPACE
        self._connection = ApiConnection(access, DEADLINES)

    async def get(self, kind: ObjectKind, name: str, namespace: str | None = None) -> KubeObject | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self._request("GET", kind.path(namespace, name))
        except KubeRefused as error:
            if error.code == 404:
                return None
            raise

    async def list(
        self, kind: ObjectKind, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> KubeListing:
        """Return all objects that match a label selector and a field selector, read in pages."""
        items: list[KubeObject] = []
        params = {"limit": str(PAGE_ITEMS), **_selectors(labels, fields)}
        while True:
            page = await self._request("GET", kind.path(namespace), params=params)
            items += page.get("items") or []
            metadata = page["metadata"]
            if not metadata.get("continue"):
                return KubeListing(items, metadata["resourceVersion"])
            params["continue"] = metadata["continue"]

    async def create(self, kind: ObjectKind, value: KubeObject, namespace: str | None = None) -> KubeObject:
        """Create an object."""
        return await self._request("POST", kind.path(namespace), value)

    async def replace(self, kind: ObjectKind, value: KubeObject, namespace: str | None = None) -> KubeObject:
        """Replace an object by one with its `resourceVersion`.

        Raise `KubeRefused` with code 409 if the object has changed since that version.
        """
        return await self._request("PUT", kind.path(namespace, value["metadata"]["name"]), value)

    async def apply(
        self,
        kind: ObjectKind,
        value: KubeObject,
        namespace: str | None = None,
        *,
        manager: str,
        subresource: str | None = None,
        is_forced: bool = True,
        is_dry_run: bool = False,
    ) -> KubeObject:
        """Create or update an object by server-side apply.

        With `is_forced`, fields of other managers are taken over; otherwise a conflict raises `KubeRefused` with code
        409. With `is_dry_run`, the server returns the result and stores nothing.
        """
        path = kind.path(namespace, value["metadata"]["name"], subresource)
        named = {"apiVersion": kind.api_version, "kind": kind.kind, **value}
        params = {"fieldManager": manager, "force": "true" if is_forced else "false"}
        if is_dry_run:
            params["dryRun"] = "All"
        return await self._request("PATCH", path, named, params, APPLY)

    async def patch(
        self,
        kind: ObjectKind,
        name: str,
        value: Any,
        namespace: str | None = None,
        *,
        content_type: str = MERGE,
        subresource: str | None = None,
    ) -> KubeObject:
        """Change an object by a patch of the given content type."""
        return await self._request("PATCH", kind.path(namespace, name, subresource), value, content_type=content_type)

    async def delete(
        self, kind: ObjectKind, name: str, namespace: str | None = None, *, grace_s: int | None = None
    ) -> bool:
        """Delete an object, a pod within its own grace period or the given one; return False if it does not exist."""
        options = None if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            await self._request("DELETE", kind.path(namespace, name), options)
        except KubeRefused as error:
            if error.code != 404:
                raise
            return False
        return True

    async def watch(
        self, kind: ObjectKind, revision: str, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> AsyncIterator[WatchChange]:
        """Yield the changes after a revision, until the server ends the watch.

        Raise `KubeRefused` with code 410 if the revision is too old.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": revision,
            "timeoutSeconds": str(WATCH_S),
            **_selectors(labels, fields),
        }
        async with self._open("GET", kind.path(namespace), params=params, deadlines=WATCH_DEADLINES) as response:
            if response.status >= 400:
                raise refusal(response.status, await response.read())
            async for line in lines_of(response):
                if line:
                    yield change_of(line)

    async def discover(self, api_version: str, kind: str) -> ObjectKind | None:
        """Return the place of a kind in the API, or None if the server does not have it."""
        return next((one for one in await self.kinds_of(api_version) if one.kind == kind), None)

    async def kinds_of(self, api_version: str) -> Sequence[ObjectKind]:
        """Return the kinds of an API version; none if the server does not have it."""
        root = "/api/" if "/" not in api_version else "/apis/"
        try:
            listed = await self._request("GET", root + api_version)
        except KubeRefused as error:
            if error.code == 404:
                return ()
            raise
        return [
            ObjectKind(api_version, one["kind"], one["name"], bool(one["namespaced"]))
            for one in listed.get("resources") or []
            if "/" not in one["name"]
        ]

    async def pod_log(
        self,
        name: str,
        namespace: str,
        *,
        container: str | None = None,
        lines: int | None = None,
        is_previous: bool = False,
    ) -> str:
        """Return the last lines of a container's log, with `is_previous` those of its last ended run."""
        params = {"container": container} if container else {}
        if is_previous:
            params["previous"] = "true"
        if lines is not None:
            params["tailLines"] = str(lines)
        async with self._open("GET", PODS.path(namespace, name, "log"), params=params) as response:
            body = await response.read()
            if response.status >= 400:
                raise refusal(response.status, body)
        return body.decode(errors="replace")

    async def follow_pod_log(
        self, name: str, namespace: str, container: str, *, lines: int, since: str = ""
    ) -> AsyncIterator[tuple[str, str]]:
        """Yield time (RFC 3339) and text of the last lines of a container's log, then of each new one until it ends.

        With `since`, the lines from that time on, which is that of the last line before. A log without a line for
        `WATCH_S` ends with `KubeUnavailable`, so that a connection that died unnoticed is found.
        """
        params = {"container": container, "follow": "true", "timestamps": "true"}
        params |= {"sinceTime": since} if since else {"tailLines": str(lines)}
        path = PODS.path(namespace, name, "log")
        async with self._open("GET", path, params=params, deadlines=WATCH_DEADLINES) as response:
            if response.status >= 400:
                raise refusal(response.status, await response.read())
            async for line in lines_of(response):
                time, _, text = line.decode(errors="replace").partition(" ")
                yield time, text

    async def close(self) -> None:
        """Close all connections."""
        await self._connection.close()

    async def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> KubeObject:
        content = b"" if body is None else json_encode(body)
        async with self._open(method, path, content, params, content_type) as response:
            received = await response.read()
            if response.status >= 400:
                raise refusal(response.status, received)
        value: KubeObject = msgspec.json.decode(received)
        return value

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        deadlines: Deadlines = DEADLINES,
    ) -> AsyncIterator[HttpResponse]:
        """Send a request; the block begins when status and headers have arrived. Raise `KubeUnavailable`."""
        target = f"{path}?{urlencode(params)}" if params else path
        headers = {"content-type": content_type} if body else {}
        try:
            async with self._connection.request(method, target, body, headers, deadlines) as response:
                yield response
        except (CannotConnect, Disconnected, ResponseTimeout, CredentialsUnavailable) as error:
            raise KubeUnavailable(f"Kubernetes API server {self.address}: {error}") from None


async def lines_of(response: HttpResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a body as they arrive, without their ends. Raise `Disconnected` for one that is too long."""
    pieces: list[bytes] = []
    size = 0
    while (part := await response.part()) is not None:
        *whole, rest = part.split(b"\n")
        for line in whole:
            yield b"".join([*pieces, line]) if pieces else line
            pieces.clear()
            size = 0
        if rest:
            pieces.append(rest)
            size += len(rest)
            if size > LINE_BYTES_MAX:
                raise Disconnected(f"a line of the response exceeds {LINE_BYTES_MAX} bytes")
    if pieces:
        yield b"".join(pieces)


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {name: value for name, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def refusal(code: int, body: bytes) -> KubeRefused:
    """Return the error of a response, which has a Status object unless it is a proxy's."""
    try:
        status = msgspec.json.decode(body)
        return KubeRefused(code, str(status.get("reason") or ""), str(status.get("message") or ""))
    except (msgspec.DecodeError, AttributeError):
        return KubeRefused(code, "", body[:200].decode(errors="replace"))


def change_of(line: str | bytes) -> WatchChange:
    """Return one line of a watch. Raise `KubeRefused` for an error of the watch, and for a malformed line."""
    try:
        event = msgspec.json.decode(line)
        kind, value = event["type"], event["object"]
        if kind == "ERROR":
            raise KubeRefused(int(value.get("code") or 500), str(value.get("reason")), str(value.get("message")))
        change = WatchChange(kind, value)
        _ = change.revision
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        raise KubeRefused(500, "InternalError", f"malformed line of a watch: {line[:200]!r}") from None
    return change
