"""The verbs of the API: create, get, list, update, patch, apply and delete, with admission and optimistic concurrency."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tests.cluster.kubernetes import builtin, checks, defaults, errors, managed_fields, metadata, selectors
from tests.cluster.kubernetes.errors import ApiError, Object
from tests.cluster.kubernetes.managed_fields import Ownership
from tests.cluster.kubernetes.patches import json_patch, merge_patch, strategic_merge_patch
from tests.cluster.kubernetes.resources import Registry, Resource
from tests.cluster.kubernetes.schema import cloned
from tests.cluster.kubernetes.storage import Name, Storage

RETRIES = 5
"""Attempts of a write without resourceVersion when another write intervenes."""
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
OWN_FIELDS = frozenset({"apiVersion", "kind", "metadata"})
APPLY_PATCH = "application/apply-patch+yaml"
NO_RESOURCE_VERSION = "must be specified for an update"


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters of a write."""

    manager: str = "unknown"
    dry_run: bool = False
    force: bool | None = None
    validation: str = "Warn"
    user: Object = field(default_factory=dict)
    subresource: str = ""
    warnings: list[str] = field(default_factory=list)
    """Filled by the write: texts of the Warning headers."""


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Parameters of a list."""

    labels: str = ""
    fields: str = ""
    limit: int = 0
    token: str = ""
    exact: int | None = None
    """Revision of a list with resourceVersionMatch=Exact."""


@dataclass(frozen=True, slots=True)
class Admission:
    """One write as webhooks see it."""

    operation: str
    resource: Resource
    name: Name
    item: Object | None
    old: Object | None
    options: Options


class Hooks(Protocol):
    """Callbacks of webhooks."""

    async def mutate(self, admission: Admission) -> Object: ...

    async def validate(self, admission: Admission) -> None: ...

    async def convert(self, resource: Resource, items: list[Object], api_version: str) -> list[Object]: ...


Change = Callable[[Object], Object | tuple[Object, list[Object]]]
"""Return the changed object, and its managed fields where the change is an apply."""


class Api:
    """Verbs over storage; the callers have authenticated and authorized the request."""

    def __init__(self, storage: Storage, registry: Registry, hooks: Hooks) -> None:
        self.storage, self.registry, self._hooks = storage, registry, hooks
        self._addresses = 0
        self.allows_loopback = False
        """Whether endpoints may have loopback addresses, which the real server refuses: those of pods that are processes here."""
        self.extra_checks: dict[tuple[str, str], Callable[[Object, Object | None], list[Object]]] = {}
        """Validation of further built-in resources."""
        self.after_write: dict[tuple[str, str], Callable[[Object | None, Object | None], None]] = {}
        """Called after a write of a resource with the stored object (None: deleted) and the one before."""

    async def read(self, resource: Resource, name: Name) -> Object:
        """Return an object in the version of the request. Raises 404."""
        found = self.storage.get(resource.key, name)
        if found is None:
            raise errors.not_found(resource.group, resource.plural, name[1])
        return (await self.convert(resource, [found]))[0]

    async def convert(self, resource: Resource, items: list[Object], api_version: str = "") -> list[Object]:
        """Return objects in a version, by default that of the request."""
        wanted = api_version or resource.api_version
        indexes = [index for index, one in enumerate(items) if one["apiVersion"] != wanted]
        if not indexes:
            return items
        converted = await self._hooks.convert(resource, [items[index] for index in indexes], wanted)
        result = list(items)
        for index, one in zip(indexes, converted, strict=True):
            result[index] = one
        return result

    async def list_page(self, resource: Resource, namespace: str, query: ListQuery) -> Object:
        """Return a page of the objects that the selectors match."""
        accepted = selection(resource, query)
        revision, start = self.storage.revision, None
        if query.token:
            revision, start = _read_token(query.token)
            items = self.storage.items_at(resource.key, namespace, revision)
        elif query.exact is not None:
            revision = query.exact
            items = self.storage.items_at(resource.key, namespace, revision)
        else:
            items = self.storage.items(resource.key, namespace)
        items = await self.convert(resource, [one for one in items if start is None or name_of(one) > start])
        items = [one for one in items if accepted(one)]
        meta: Object = {"resourceVersion": str(revision)}
        if query.limit and len(items) > query.limit:
            meta["continue"] = _write_token(revision, name_of(items[query.limit - 1]))
            if not query.labels and not query.fields:
                meta["remainingItemCount"] = len(items) - query.limit
            items = items[: query.limit]
        if not resource.custom:
            items = [{name: one for name, one in item.items() if name not in {"apiVersion", "kind"}} for item in items]
        return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta, "items": items}

    async def create(
        self, resource: Resource, namespace: str, body: Any, options: Options, config: Object | None = None
    ) -> Object:
        """Store a new object, from an applied configuration where one is given. Raises 400, 403, 404, 409 or 422."""
        item = self._decoded(resource, namespace, body, options)
        if config is None:
            self._drop_nulls(resource, item)
        own = item["metadata"]
        if own.get("resourceVersion"):
            # Released servers do the same.
            raise ApiError(500, "resourceVersion should not be set on objects to be created")
        self._check_namespace(resource, namespace, own.get("name", ""))
        is_generated = not own.get("name") and bool(own.get("generateName"))
        if is_generated:
            own["name"] = metadata.generated_name(own["generateName"])
        elif not own.get("name"):
            raise errors.invalid(
                resource.group,
                resource.kind,
                "",
                [errors.required("metadata.name", "name or generateName is required")],
            )
        metadata.start(item, resource)
        if resource.status:
            item.pop("status", None)
        name = namespace, own["name"]
        self._default(resource, item)
        own.pop("managedFields", None)
        owner, schema = self._ownership(resource, options), resource.schema
        own["managedFields"] = (
            owner.apply({}, config, schema, {}, force=True)[1] if config else owner.update({}, item, schema, {})
        )
        item = await self._admitted(Admission("CREATE", resource, name, item, None, options))
        stored = (await self.convert(resource, [item], resource.stored_version))[0]
        if self.storage.get(resource.key, name) is not None:
            raise errors.already_exists(resource.group, resource.plural, name[1])
        self._check_namespace(resource, namespace, name[1])
        return await self._commit(resource, stored, None, options)

    async def update(self, resource: Resource, name: Name, body: Any, options: Options) -> Object:
        """Replace an object or its status. Raises 404, 409 or 422."""
        item = self._decoded(resource, name[0], body, options)
        self._drop_nulls(resource, item)
        given = item["metadata"].setdefault("name", name[1])
        if given != name[1]:
            raise ApiError(400, f"the name of the object ({given}) does not match the name on the URL ({name[1]})")
        if self.storage.get(resource.key, name) is None and resource.create_on_update and not options.subresource:
            return await self.create(resource, name[0], item, options)
        if not item["metadata"].get("resourceVersion") and not resource.unconditional_update:
            await self.read(resource, name)
            problem = errors.invalid_value("metadata.resourceVersion", 0, NO_RESOURCE_VERSION)
            raise errors.invalid(resource.group, resource.kind, name[1], [problem])
        return await self.change(resource, name, lambda _: cloned(item), options)

    async def patch(self, resource: Resource, name: Name, content_type: str, body: Any, options: Options) -> Object:
        """Apply a patch of one of the four types. Raises 404, 409, 415 or 422."""
        allowed = (
            [JSON_PATCH, MERGE_PATCH, APPLY_PATCH]
            if resource.custom
            else [JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, APPLY_PATCH]
        )
        if content_type not in allowed:
            accepted = ", ".join(allowed)
            raise ApiError(
                415, f"the body of the request was in an unknown format - accepted media types include: {accepted}"
            )
        if content_type == APPLY_PATCH:
            return await self._apply(resource, name, body, options)
        if options.force is not None:
            problem = errors.forbidden_field("force", "may not be specified for non-apply patch")
            raise errors.invalid("meta.k8s.io", "PatchOptions", "", [problem])
        if content_type != JSON_PATCH and not isinstance(body, dict):
            raise ApiError(
                400, "error decoding patch: json: cannot unmarshal into Go value of type map[string]interface {}"
            )

        def patched(live: Object) -> Object:
            if content_type == JSON_PATCH:
                result = json_patch(live, body)
            elif content_type == MERGE_PATCH:
                result = merge_patch(live, body)
            else:
                result = strategic_merge_patch(live, body, resource.schema)
            item = self._decoded(resource, name[0], result, options)
            self._drop_nulls(resource, item)
            return item

        return await self.change(resource, name, patched, options)

    async def _apply(self, resource: Resource, name: Name, body: Any, options: Options) -> Object:
        if options.manager == "unknown":
            problem = errors.required("fieldManager", "is required for apply patch")
            raise errors.invalid("meta.k8s.io", "PatchOptions", "", [problem])
        config = self._decoded(resource, name[0], body, options)
        if resource.custom:
            self._check_declared(resource, name, body)
        if config["metadata"].get("managedFields") is not None:
            raise ApiError(400, "metadata.managedFields must be nil")
        if config["metadata"].setdefault("name", name[1]) != name[1]:
            raise ApiError(
                400,
                f"the name of the object ({config['metadata']['name']}) does not match the name on the URL ({name[1]})",
            )
        schema = resource.schema
        owner = self._ownership(resource, options)
        force = bool(options.force)
        if self.storage.get(resource.key, name) is None:
            if options.subresource:
                raise errors.not_found(resource.group, resource.plural, name[1])
            if config["metadata"].get("uid"):
                raise errors.conflict(
                    resource.group,
                    resource.plural,
                    name[1],
                    f"uid mismatch: the provided object specified uid {config['metadata']['uid']}, and no existing object was found",
                )
            return await self.create(resource, name[0], config, options, config)

        def applied(live: Object) -> tuple[Object, list[Object]]:
            managers = managed_fields.decode(live["metadata"].get("managedFields"))
            return owner.apply(live, config, schema, managers, force=force)

        return await self.change(resource, name, applied, options)

    def _check_declared(self, resource: Resource, name: Name, body: Object) -> None:
        """Raise 500, as the released server does, where an applied object has a field that its definition does not
        declare.
        """
        unknown: list[str] = []
        resource.schema.prune({part: one for part, one in body.items() if part not in OWN_FIELDS}, "", unknown)
        if unknown:
            what = f"{body['metadata'].get('namespace', '')}/{name[1]}; {resource.api_version}, Kind={resource.kind}"
            text = f"failed to create typed patch object ({what}): .{unknown[0]}: field not declared in schema"
            raise ApiError(500, text)

    async def change(self, resource: Resource, name: Name, change: Change, options: Options) -> Object:
        """Change an object; without resourceVersion the change is repeated when another write intervenes."""
        for _ in range(RETRIES):
            stored = self.storage.get(resource.key, name)
            if stored is None:
                raise errors.not_found(resource.group, resource.plural, name[1])
            live = (await self.convert(resource, [stored]))[0]
            item, is_conditional = self._changed(resource, live, change, options)
            if item == live:
                return live
            admitted = await self._admitted(Admission("UPDATE", resource, name, item, live, options))
            if admitted == live:
                return live
            final = (await self.convert(resource, [admitted], resource.stored_version))[0]
            if self.storage.get(resource.key, name) is stored:
                return await self._commit(resource, final, stored, options)
            if is_conditional:
                break
        raise errors.conflict(resource.group, resource.plural, name[1])

    def _changed(self, resource: Resource, live: Object, change: Change, options: Options) -> tuple[Object, bool]:
        """Return the changed object before admission, and whether its writer gave a resourceVersion."""
        result = change(live)
        item, entries = result if isinstance(result, tuple) else (result, None)
        own = dict(item["metadata"])
        item = {**item, "metadata": own}
        version, current = own.get("resourceVersion"), live["metadata"]["resourceVersion"]
        if version and version not in {current, "0"}:
            raise errors.conflict(resource.group, resource.plural, own["name"])
        if own.get("uid") and own["uid"] != live["metadata"]["uid"]:
            text = (
                f"Precondition failed: UID in precondition: {own['uid']}, UID in object meta: {live['metadata']['uid']}"
            )
            raise errors.conflict(resource.group, resource.plural, own["name"], text)
        given = own.get("managedFields")
        own["resourceVersion"] = current
        own["managedFields"] = live["metadata"].get("managedFields", [])
        self._default(resource, item)  # Before generations are compared: an absent default is no change.
        metadata.carry_over(item, live, resource, options.subresource)
        own = item["metadata"]
        if entries is None:
            owner = self._ownership(resource, options)
            before = [] if given in ([], [{}]) else own["managedFields"]
            schema = resource.schema
            entries = owner.update(live, item, schema, managed_fields.decode(before)) if given not in ([], [{}]) else []
        own["managedFields"] = entries
        if not entries:
            del own["managedFields"]
        return item, bool(version)

    async def delete(self, resource: Resource, name: Name, body: Any, options: Options) -> Object:
        """Delete an object, or mark it where finalizers remain. Raises 404 or 409."""
        live = await self.read(resource, name)
        body = body if isinstance(body, dict) else {}
        for what, wanted in (body.get("preconditions") or {}).items():
            found = live["metadata"].get(what)
            if wanted is not None and wanted != found:
                label = {"uid": "UID", "resourceVersion": "ResourceVersion"}[what]
                text = f"Precondition failed: {label} in precondition: {wanted}, {label} in object meta: {found}"
                raise errors.conflict(resource.group, resource.plural, name[1], text)
        policy = body.get("propagationPolicy") or (
            "Orphan" if body.get("orphanDependents") or (resource.kind == "Job" and not resource.custom) else ""
        )
        if policy and policy not in metadata.FINALIZERS:
            problem = errors.not_supported("propagationPolicy", policy, ["Foreground", "Background", "Orphan", "nil"])
            raise errors.invalid("meta.k8s.io", "DeleteOptions", "", [problem])
        await self._hooks.validate(Admission("DELETE", resource, name, None, live, options))
        grace = builtin.grace_period(resource, live, body.get("gracePeriodSeconds"))
        return await self.mark_or_remove(resource, name, policy, grace, options)

    async def mark_or_remove(self, resource: Resource, name: Name, policy: str, grace: int, options: Options) -> Object:
        """Remove an object without finalizers and grace period; mark any other one."""
        stored = self.storage.get(resource.key, name)
        if stored is None:
            raise errors.not_found(resource.group, resource.plural, name[1])
        finalizers = metadata.with_policy(stored["metadata"].get("finalizers") or [], policy)
        is_namespace = resource.key == ("", "namespaces")
        if finalizers or grace or is_namespace:
            if (
                stored["metadata"].get("deletionTimestamp")
                and grace >= stored["metadata"].get("deletionGracePeriodSeconds", 0)
                and finalizers == (stored["metadata"].get("finalizers") or [])
            ):
                return (await self.convert(resource, [stored]))[0]
            marked = metadata.mark_deleted(stored, resource, policy, grace)
            if is_namespace:
                marked = {**marked, "status": {"phase": "Terminating"}}
            return await self._commit(resource, marked, stored, options)
        if not options.dry_run:
            self.remove(resource, name)
        details = {"name": name[1], "group": resource.group, "kind": resource.plural, "uid": stored["metadata"]["uid"]}
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
            "details": {key: value for key, value in details.items() if value},
        }  # fmt: skip

    def remove(self, resource: Resource, name: Name) -> None:
        """Delete an object from storage."""
        before = self.storage.get(resource.key, name)
        self.storage.remove(resource.key, name)
        if resource.key in self.after_write:
            self.after_write[resource.key](None, before)

    async def delete_all(
        self, resource: Resource, namespace: str, query: ListQuery, body: Any, options: Options
    ) -> Object:
        """Delete everything that the selectors match, and return it."""
        listed = await self.list_page(resource, namespace, query)
        for one in listed["items"]:
            await self.delete(resource, name_of(one), body, options)
        return listed

    async def _commit(self, resource: Resource, item: Object, before: Object | None, options: Options) -> Object:
        """Store an object, or remove it where its last finalizer is gone, and return it in the version of the request."""
        if options.dry_run:
            return (await self.convert(resource, [item]))[0]
        own = item["metadata"]
        name = name_of(item)
        if (
            own.get("deletionTimestamp")
            and not own.get("finalizers")
            and not own.get("deletionGracePeriodSeconds")
            and resource.key != ("", "namespaces")
        ):
            self.remove(resource, name)
            return (await self.convert(resource, [item]))[0]
        stored = self.storage.put(resource.key, item)
        if resource.key in self.after_write:
            self.after_write[resource.key](stored, before)
        return (await self.convert(resource, [stored]))[0]

    async def _admitted(self, admission: Admission) -> Object:
        """Return the object after mutating webhooks, validation and validating webhooks."""
        resource, live, options = admission.resource, admission.old, admission.options
        assert admission.item is not None
        item = await self._hooks.mutate(admission)
        if item is not admission.item:
            item = self._decoded(resource, admission.name[0], item, options)
            self._default(resource, item)
            managers = managed_fields.decode(admission.item["metadata"].get("managedFields"))
            owner = self._ownership(resource, options)
            entries = owner.update(admission.item, item, resource.schema, managers)
            item["metadata"]["managedFields"] = entries
        causes = metadata.check(item, resource, live)
        causes += resource.schema.validate(item, "", live)
        causes += self._checks(resource, item, live)
        if causes:
            raise errors.invalid(resource.group, resource.kind, item["metadata"]["name"], causes)
        await self._hooks.validate(replace(admission, item=item))
        return item

    def _decoded(self, resource: Resource, namespace: str, body: Any, options: Options) -> Object:
        """Return a copy of a body without unknown fields. Raises 400 where it is not an object of the resource."""
        if not isinstance(body, dict):
            raise ApiError(
                400,
                f"couldn't get version/kind; json parse error: cannot unmarshal {type(body).__name__} into an object",
            )
        given = body.setdefault("apiVersion", resource.api_version), body.setdefault("kind", resource.kind)
        if given[0] != resource.api_version:
            raise ApiError(
                400,
                f"the API version in the data ({given[0]}) does not match the expected API version ({resource.api_version})",
            )
        if given[1] != resource.kind:
            raise ApiError(
                400,
                f"the object provided is unrecognized (must be of type {resource.kind}): {given[0]}, Kind={given[1]}",
            )
        unknown: list[str] = []
        rest = resource.schema.prune({name: one for name, one in body.items() if name != "metadata"}, "", unknown)
        own = body.get("metadata") or {}
        if problems := metadata.METADATA.validate(own, "metadata"):
            raise ApiError(
                400,
                f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: {problems[0]["message"]}',
            )
        item = {**cloned(rest), "apiVersion": given[0], "kind": given[1]}
        item["metadata"] = cloned(metadata.METADATA.prune(own, "metadata", unknown))
        unknown = [one for one in unknown if one not in {"apiVersion", "kind"}]
        if unknown and options.validation == "Strict":
            text = ", ".join(f'unknown field "{one}"' for one in unknown)
            raise ApiError(
                400,
                f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: strict decoding error: {text}',
            )
        if options.validation == "Warn":
            options.warnings.extend(f'unknown field "{one}"' for one in unknown)
        builtin.check_types(resource, item)
        if resource.namespaced and item["metadata"].setdefault("namespace", namespace) != namespace:
            raise ApiError(400, "the namespace of the provided object does not match the namespace sent on the request")
        if not resource.namespaced:
            item["metadata"].pop("namespace", None)
        return item

    @staticmethod
    def _drop_nulls(resource: Resource, item: Object) -> None:
        """Remove the nulls of a custom object, except in an apply: there they are refused."""
        if resource.custom:
            resource.schema.drop_nulls(item)

    def _checks(self, resource: Resource, item: Object, live: Object | None) -> list[Object]:
        if resource.custom:
            return []
        extra = self.extra_checks.get(resource.key)
        found = checks.check(item, live) + (extra(item, live) if extra else [])
        if item["kind"] == "EndpointSlice" and not self.allows_loopback:
            found += checks.check_slice(item)
        return found

    def _default(self, resource: Resource, item: Object) -> None:
        resource.schema.apply_defaults(item)
        if not resource.custom:
            defaults.apply_defaults(item)
            if item["kind"] == "Service":
                self._allocate_address(item)

    def _allocate_address(self, item: Object) -> None:
        spec = item["spec"]
        if spec["type"] == "ExternalName":
            return
        if not spec.get("clusterIP"):
            stored = self.storage.get(("", "services"), name_of(item))
            self._addresses += 1
            high, low = divmod(self._addresses, 250)
            spec["clusterIP"] = stored["spec"]["clusterIP"] if stored else f"10.0.{high}.{low + 2}"
        spec.setdefault("clusterIPs", [spec["clusterIP"]])

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        if not resource.namespaced:
            return
        found = self.storage.get(("", "namespaces"), ("", namespace))
        if found is None:
            raise errors.not_found("", "namespaces", namespace)
        if found["metadata"].get("deletionTimestamp"):
            text = f"unable to create new content in namespace {namespace} because it is being terminated"
            why = errors.cause(
                "NamespaceTerminating", f"namespace {namespace} is being terminated", "metadata.namespace"
            )
            raise errors.forbidden(resource.group, resource.plural, name, text, [why])

    def _ownership(self, resource: Resource, options: Options) -> Ownership:
        ignored: tuple[managed_fields.Path, ...] = ()
        if options.subresource == "status":
            ignored = (("f:spec",), ("f:metadata",)) if resource.custom else (("f:spec",),)
        elif resource.status:
            ignored = (("f:status",),)
        return Ownership(options.manager, resource.api_version, options.subresource, metadata.now(), ignored)


def name_of(item: Object) -> Name:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def selection(resource: Resource, query: ListQuery) -> selectors.Predicate:
    """Return the predicate of both selectors."""
    labels = selectors.label_selector(query.labels) if query.labels else None
    fields = selectors.field_selector(query.fields, resource.kind) if query.fields else None
    return lambda item: (labels is None or labels(item)) and (fields is None or fields(item))


def _write_token(revision: int, last: Name) -> str:
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": revision, "start": "\0".join(last)})
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_token(token: str) -> tuple[int, Name]:
    try:
        found = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        namespace, name = found["start"].split("\0")
        return int(found["rv"]), (namespace, name)
    except (ValueError, KeyError, TypeError):
        raise ApiError(400, "continue key is not valid") from None
