"""HTTP shell of the API server: discovery, routes, authentication, watches, and the faults that tests inject."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.cluster.kubernetes import errors
from tests.cluster.kubernetes.api import APPLY_PATCH, Api, ListQuery, Options, selection
from tests.cluster.kubernetes.authorization import Authorizer, account_user, verb_of
from tests.cluster.kubernetes.builtin import schema_of
from tests.cluster.kubernetes.custom import CustomResources
from tests.cluster.kubernetes.errors import ApiError, Object
from tests.cluster.kubernetes.faults import FAULTS_PATH, Faults
from tests.cluster.kubernetes.kubeconfig import ADMIN_TOKEN
from tests.cluster.kubernetes.resources import Registry, Resource, builtin_resources
from tests.cluster.kubernetes.scale import read_scale, write_scale
from tests.cluster.kubernetes.storage import Event, Storage, encode
from tests.cluster.kubernetes.webhooks import Webhooks

VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0-test", "platform": "linux/amd64"}
BOOKMARK_S = 5.0
"""Seconds between the bookmarks of a watch; a released server sends one a minute."""
MAX_WATCH_S = 1800.0
MAX_BODY = 3 * 1024 * 1024


class ApiServer:
    """The application and the state behind it."""

    def __init__(self, *, tokens: dict[str, list[str]] | None = None) -> None:
        self.storage, self.registry = Storage(), Registry()
        for resource in builtin_resources(schema_of):
            self.registry.add(resource)
        self.authorizer = Authorizer(self.storage)
        self.webhooks = Webhooks(self.storage, self.registry)
        self.api = Api(self.storage, self.registry, self.webhooks)
        self.custom = CustomResources(self.api)
        self.tokens = tokens or {ADMIN_TOKEN: ["admin", "system:masters"]}
        self.faults = Faults(self.storage)
        self.logs: dict[str, str] = {}
        self.bookmark_s = BOOKMARK_S
        self.requests: dict[str, int] = {}
        """Served requests by verb and resource."""
        everything = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        self.app = Starlette(
            routes=[
                Route("/version", self._version), Route("/healthz", self._healthy), Route("/readyz", self._healthy),
                Route("/livez", self._healthy), Route(FAULTS_PATH, self.faults.handle, methods=["GET", "POST"]),
                Route("/{path:path}", self._handle, methods=everything),
            ]
        )  # fmt: skip

    async def start(self) -> None:
        """Create the namespaces of a new cluster."""
        for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await self.api.create(self._known("", "v1", "namespaces"), "", body, Options(manager="kube-apiserver"))

    async def _version(self, _: Request) -> Response:
        return JSONResponse(VERSION)

    async def _healthy(self, _: Request) -> Response:
        return PlainTextResponse("ok")

    async def _handle(self, request: Request) -> Response:
        try:
            user = self._authenticate(request)
            refused = await self.faults.before(request)
            return refused or await self._route(request, user)
        except ApiError as error:
            headers = {}
            if error.details and "retryAfterSeconds" in error.details:
                headers["retry-after"] = str(error.details["retryAfterSeconds"])
            return JSONResponse(error.status(), error.code, headers)

    def _authenticate(self, request: Request) -> Object:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        found = self.tokens.get(token) if scheme == "Bearer" else None
        if found is None:
            raise ApiError(401, "Unauthorized")
        return {"username": found[0], "groups": [*found[1:], "system:authenticated"]}

    def _known(self, group: str, version: str, plural: str) -> Resource:
        found = self.registry.find(group, version, plural)
        if found is None:
            raise ApiError(404, "the server could not find the requested resource", details={})
        return found

    async def _route(self, request: Request, user: Object) -> Response:
        parts = [part for part in request.url.path.split("/") if part]
        if not parts or parts[0] not in {"api", "apis"}:
            return self._document(parts)
        depth = 2 if parts[0] == "api" else 3
        if len(parts) <= depth:
            return self._discovery(parts)
        group, version = ("", parts[1]) if depth == 2 else (parts[1], parts[2])
        rest = parts[depth:]
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in {"status", "finalize"}:
            namespace, rest = rest[1], rest[2:]
        resource = self._known(group, version, rest[0])
        self._authorize(request, resource, namespace, rest[1:], user)
        return await self._resource(request, resource, namespace, rest[1:], user)

    def _authorize(self, request: Request, resource: Resource, namespace: str, rest: list[str], user: Object) -> None:
        """Raise 403 for a request that the user's roles do not allow; an apply that creates requires both rights."""
        is_watch = request.query_params.get("watch", "") in {"1", "true"}
        verb = verb_of(request.method, is_named=bool(rest), is_watch=is_watch)
        name, subresource = rest[0] if rest else "", rest[1] if len(rest) > 1 else ""
        verbs = [verb]
        is_apply = request.headers.get("content-type", "").startswith(APPLY_PATCH)
        if (
            verb == "patch"
            and is_apply
            and not subresource
            and self.storage.get(resource.key, (namespace, name)) is None
        ):
            verbs.append("create")
        for one in verbs:
            self.authorizer.check(user, resource, subresource, namespace, name, one)

    def account_token(self, namespace: str, name: str) -> str:
        """Return a bearer token of a service account."""
        token = f"account:{namespace}:{name}"
        self.tokens[token] = account_user(namespace, name)
        return token

    def _document(self, parts: list[str]) -> Response:
        if parts[:2] == ["openapi", "v3"]:
            return JSONResponse(self._schemas(parts[2:]))
        if parts[:1] == ["openapi"]:
            return JSONResponse({"swagger": "2.0", "info": {"title": "test", "version": "1"}, "paths": {}})
        raise ApiError(404, "the server could not find the requested resource")

    def _schemas(self, parts: list[str]) -> Object:
        """Return the index of the OpenAPI documents, or that of one version: clients look for `fieldValidation` in it."""
        if not parts:
            versions = self.registry.group_versions()
            paths = [
                f"apis/{group}/{one}" if group else f"api/{one}" for group, found in versions.items() for one in found
            ]
            return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in paths}}
        group, version = ("", parts[-1]) if parts[0] == "api" else (parts[1], parts[-1])
        found = {}
        for one in self.registry.in_version(group, version):
            place = f"/{'/'.join(parts)}/{'namespaces/{namespace}/' if one.namespaced else ''}{one.plural}/{{name}}"
            patch = {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "responses": {},
                "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": one.kind},
            }
            found[place] = {"patch": patch}
        return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": found}

    def _discovery(self, parts: list[str]) -> Response:
        versions = self.registry.group_versions()
        if parts == ["api"]:
            return JSONResponse({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
        groups = [_api_group(group, found) for group, found in versions.items() if group]
        if parts == ["apis"]:
            return JSONResponse({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        if parts[0] == "apis" and len(parts) == 2:
            for one in groups:
                if one["name"] == parts[1]:
                    return JSONResponse({"kind": "APIGroup", "apiVersion": "v1", **one})
        group, version = ("", parts[1]) if parts[0] == "api" else (parts[1], parts[-1])
        resources = self.registry.in_version(group, version)
        if not resources or (parts[0] == "apis" and len(parts) != 3):
            raise ApiError(404, "the server could not find the requested resource")
        listed = [entry for one in sorted(resources, key=lambda one: one.plural) for entry in one.discovery()]
        group_version = f"{group}/{version}" if group else version
        return JSONResponse(
            {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": listed}
        )

    async def _resource(
        self, request: Request, resource: Resource, namespace: str, rest: list[str], user: Object
    ) -> Response:
        options = _options(request, user, rest[1] if len(rest) > 1 else "")
        if not rest:
            return await self._collection(request, resource, namespace, options)
        if resource.namespaced and not namespace:
            raise ApiError(404, "the server could not find the requested resource")
        name = namespace, rest[0]
        match rest[1:]:
            case []:
                return await self._named(request, resource, name, options)
            case ["status"] if resource.status and request.method != "DELETE":
                return await self._named(request, resource, name, options)
            case ["scale"] if resource.scale:
                self._count(request, resource, "scale")
                if request.method == "GET":
                    return _json(read_scale(resource, await self.api.read(resource, name)))
                content_type, body = await _body(request)
                return _json(await write_scale(self.api, resource, name, request.method, content_type, body, options))
            case ["log"] if resource.key == ("", "pods"):
                await self.api.read(resource, name)
                return PlainTextResponse(self.logs.get("/".join(name), ""))
        raise ApiError(404, "the server could not find the requested resource")

    def _count(self, request: Request, resource: Resource, verb: str = "") -> None:
        at = f"{verb or request.method} {resource.plural}"
        self.requests[at] = self.requests.get(at, 0) + 1

    async def _collection(self, request: Request, resource: Resource, namespace: str, options: Options) -> Response:
        query = _list_query(request)
        if request.method == "GET" and request.query_params.get("watch", "") in {"1", "true"}:
            self._count(request, resource, "WATCH")
            return self._watch(request, resource, namespace, query)
        self._count(request, resource)
        if request.method == "GET":
            self._check_revision(request)
            return _json(await self.api.list_page(resource, namespace, query), request)
        if resource.namespaced and not namespace:
            raise ApiError(405, "the server does not allow this method on the requested resource", "MethodNotAllowed")
        _, body = await _body(request)
        if request.method == "POST":
            created = await self.api.create(resource, namespace, body, options)
            return _json(created, request, 201, options.warnings)
        if request.method == "DELETE":
            return _json(await self.api.delete_all(resource, namespace, query, body, options), request)
        raise ApiError(405, "the server does not allow this method on the requested resource")

    def _check_revision(self, request: Request) -> None:
        given = request.query_params.get("resourceVersion") or "0"
        if not given.isdigit():
            raise ApiError(400, f"Invalid value: {errors.quoted(given)}: resourceVersion must be a number")
        if int(given) > self.storage.revision:
            details = {
                "causes": [errors.cause("ResourceVersionTooLarge", "Too large resource version", "")],
                "retryAfterSeconds": 1,
            }
            raise ApiError(
                504, f"Too large resource version: {given}, current: {self.storage.revision}", details=details
            )

    async def _named(self, request: Request, resource: Resource, name: tuple[str, str], options: Options) -> Response:
        self._count(request, resource)
        if request.method == "GET":
            self._check_revision(request)
            return _json(await self.api.read(resource, name), request)
        content_type, body = await _body(request)
        if request.method == "PUT":
            return _json(await self.api.update(resource, name, body, options), request, 200, options.warnings)
        if request.method == "PATCH":
            is_new = content_type == APPLY_PATCH and self.storage.get(resource.key, name) is None
            changed = await self.api.patch(resource, name, content_type, body, options)
            return _json(changed, request, 201 if is_new else 200, options.warnings)
        if request.method == "DELETE":
            return _json(await self.api.delete(resource, name, body, options), request)
        raise ApiError(405, "the server does not allow this method on the requested resource")

    def _watch(self, request: Request, resource: Resource, namespace: str, query: ListQuery) -> Response:
        accepted = selection(resource, query)
        self._check_watch(request)
        stream = self._events(request, resource, namespace, accepted)
        return StreamingResponse(stream, media_type="application/json")

    def _check_watch(self, request: Request) -> None:
        given = request.query_params.get("resourceVersion") or "0"
        if not given.isdigit():
            raise ApiError(400, f"Invalid value: {errors.quoted(given)}: resourceVersion must be a number")

    async def _events(
        self, request: Request, resource: Resource, namespace: str, accepted: Callable[[Object], bool]
    ) -> AsyncIterator[bytes]:
        parameters = request.query_params
        bookmarks = parameters.get("allowWatchBookmarks") in {"1", "true"}
        revision = int(parameters.get("resourceVersion") or 0)
        initial = parameters.get("sendInitialEvents") == "true"
        loop = asyncio.get_running_loop()
        end = loop.time() + min(float(parameters.get("timeoutSeconds") or MAX_WATCH_S), MAX_WATCH_S)
        subscription = self.storage.subscribe(resource.key)
        try:
            if initial or revision == 0:
                revision = self.storage.revision
                found = await self.api.convert(resource, self.storage.items(resource.key, namespace))
                for one in found:
                    if accepted(one):
                        yield encode({"type": "ADDED", "object": one}) + b"\n"
                if initial and bookmarks:
                    yield _bookmark(resource, revision, {"k8s.io/initial-events-end": "true"})
            else:
                subscription.events.extendleft(reversed(self.storage.since(revision)))
            next_bookmark = loop.time() + self.bookmark_s
            while not subscription.is_closed and loop.time() < end:
                while subscription.events:
                    event = subscription.events.popleft()
                    if event.revision <= revision or event.key != resource.key:
                        continue
                    revision = event.revision
                    if namespace and event.name[0] != namespace:
                        continue
                    line = await self._event(event, resource, accepted)
                    if line:
                        yield line
                if bookmarks and loop.time() >= next_bookmark:
                    yield _bookmark(resource, self.storage.revision)
                    next_bookmark = loop.time() + self.bookmark_s
                await subscription.wait(max(0.0, min(end, next_bookmark) - loop.time()))
        except ApiError as error:
            yield encode({"type": "ERROR", "object": error.status()}) + b"\n"
        finally:
            self.storage.unsubscribe(resource.key, subscription)

    async def _event(self, event: Event, resource: Resource, accepted: Callable[[Object], bool]) -> bytes | None:
        """Return the line of an event: an object that enters or leaves the selection is added or deleted."""
        before = (await self.api.convert(resource, [event.before]))[0] if event.before else None
        after = (await self.api.convert(resource, [event.after]))[0]
        was = before is not None and accepted(before)
        is_in = event.kind != "DELETED" and accepted(after)
        if is_in:
            kind, item = ("MODIFIED" if was else "ADDED"), after
        elif was:
            assert before is not None
            kind = "DELETED"
            version = event.after["metadata"]["resourceVersion"]
            item = {**before, "metadata": {**before["metadata"], "resourceVersion": version}}
        else:
            return None
        at = kind, resource.api_version
        if at not in event.encoded:
            event.encoded[at] = encode({"type": kind, "object": item}) + b"\n"
        return event.encoded[at]


def _api_group(group: str, versions: list[str]) -> Object:
    listed = [{"groupVersion": f"{group}/{version}", "version": version} for version in versions]
    return {"name": group, "versions": listed, "preferredVersion": listed[0]}


def _bookmark(resource: Resource, revision: int, annotations: dict[str, str] | None = None) -> bytes:
    metadata: Object = {"resourceVersion": str(revision), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    item = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
    return encode({"type": "BOOKMARK", "object": item}) + b"\n"


def _options(request: Request, user: Object, subresource: str) -> Options:
    given = request.query_params
    manager = given.get("fieldManager") or request.headers.get("user-agent", "unknown").partition("/")[0] or "unknown"
    if request.method == "PATCH" and _media_type(request) == APPLY_PATCH:
        manager = given.get("fieldManager") or "unknown"
    force = given.get("force")
    return Options(
        manager, given.get("dryRun") == "All", None if force is None else force in {"1", "true"},
        given.get("fieldValidation") or "Warn", user, subresource,
    )  # fmt: skip


def _list_query(request: Request) -> ListQuery:
    given = request.query_params
    limit = given.get("limit") or "0"
    exact = int(given["resourceVersion"]) if given.get("resourceVersionMatch") == "Exact" else None
    return ListQuery(
        given.get("labelSelector") or "", given.get("fieldSelector") or "",
        int(limit) if limit.isdigit() else 0, given.get("continue") or "", exact,
    )  # fmt: skip


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "application/json").partition(";")[0].strip()


class _PlainLoader(yaml.CSafeLoader):
    """Timestamps stay strings."""


_PlainLoader.yaml_implicit_resolvers = {
    first: [one for one in found if one[0] != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


async def _body(request: Request) -> tuple[str, Any]:
    """Return the media type and the decoded body. Raises 400, 413 and 415."""
    data = await request.body()
    content_type = _media_type(request)
    if len(data) > MAX_BODY:
        raise ApiError(413, f"Request entity too large: limit is {MAX_BODY}")
    if not data:
        return content_type, None
    if content_type not in {"application/json", "application/yaml", ""} and request.method != "PATCH":
        accepted = "application/json, application/yaml, application/vnd.kubernetes.protobuf"
        raise ApiError(
            415, f"the body of the request was in an unknown format - accepted media types include: {accepted}"
        )
    try:
        if "yaml" in content_type and not data.lstrip().startswith(b"{"):
            return content_type, yaml.load(data, _PlainLoader)
        return content_type, msgspec.json.decode(data)
    except (msgspec.DecodeError, yaml.YAMLError) as error:
        raise ApiError(400, f"couldn't get version/kind; json parse error: {error}") from error


def _json(item: Object, request: Request | None = None, code: int = 200, warnings: list[str] | None = None) -> Response:
    if request is not None and "as=PartialObjectMetadata" in request.headers.get("accept", ""):
        item = _partial(item)
    response = Response(encode(item), code, media_type="application/json")
    for text in dict.fromkeys(warnings or ()):
        response.headers.append(
            "warning", f'299 - "{text}"'.replace('"' + text + '"', '"' + text.replace('"', '\\"') + '"')
        )
    return response


def _partial(item: Object) -> Object:
    version = "meta.k8s.io/v1"
    if "items" in item:
        items = [
            {"kind": "PartialObjectMetadata", "apiVersion": version, "metadata": one["metadata"]}
            for one in item["items"]
        ]
        return {
            "kind": "PartialObjectMetadataList",
            "apiVersion": version,
            "metadata": item["metadata"],
            "items": items,
        }
    return {"kind": "PartialObjectMetadata", "apiVersion": version, "metadata": item.get("metadata", {})}
