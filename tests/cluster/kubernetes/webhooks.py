"""Admission and conversion webhooks: which apply to a request, and the calls over TLS."""

import base64
import json
import ssl
import uuid
from typing import Any

import httpx
from tests.cluster.kubernetes.api import Admission
from tests.cluster.kubernetes.errors import ApiError, Object
from tests.cluster.kubernetes.patches import json_patch
from tests.cluster.kubernetes.resources import Registry, Resource
from tests.cluster.kubernetes.selectors import object_selector
from tests.cluster.kubernetes.storage import Storage

GROUP = "admissionregistration.k8s.io"


class Webhooks:
    """Calls the webhooks that the stored configurations name."""

    def __init__(self, storage: Storage, registry: Registry) -> None:
        self._storage, self._registry = storage, registry
        self._contexts: dict[str, ssl.SSLContext] = {}
        self.service_addresses: dict[str, str] = {}
        """Base URL of each `clientConfig.service`, by `namespace/name`.

        The certificate is still that of the service.
        """

    async def mutate(self, admission: Admission) -> Object:
        """Return the object after the mutating webhooks, in the order of their names."""
        assert admission.item is not None
        item = admission.item
        for hook in self._matching("mutatingwebhookconfigurations", admission):
            response = await self._admit(hook, admission, item)
            if response.get("patch"):
                item = json_patch(item, json.loads(base64.b64decode(response["patch"])))
        return item

    async def validate(self, admission: Admission) -> None:
        """Raise the refusal of the first validating webhook that refuses."""
        for hook in self._matching("validatingwebhookconfigurations", admission):
            await self._admit(hook, admission, admission.item)

    def _matching(self, plural: str, admission: Admission) -> list[Object]:
        found = []
        for configuration in self._storage.items((GROUP, plural)):
            found += [hook for hook in configuration.get("webhooks") or [] if self._matches(hook, admission)]
        return found

    def _matches(self, hook: Object, admission: Admission) -> bool:
        resource = admission.resource
        if resource.group == GROUP or not any(_rule_matches(rule, admission) for rule in hook.get("rules") or []):
            return False
        if resource.namespaced:
            namespace = self._storage.get(("", "namespaces"), ("", admission.name[0])) or {"metadata": {}}
            if not object_selector(hook.get("namespaceSelector") or {})(namespace["metadata"].get("labels") or {}):
                return False
        accepts = object_selector(hook.get("objectSelector") or {})
        return any(accepts(one["metadata"].get("labels") or {}) for one in (admission.item, admission.old) if one)

    async def _admit(self, hook: Object, admission: Admission, item: Object | None) -> Object:
        """Return the response of a webhook. Raises its refusal, and 500 where it fails under failurePolicy Fail."""
        request = await self._request(hook, admission, item)
        if request["dryRun"] and hook.get("sideEffects") not in {"None", "NoneOnDryRun"}:
            raise ApiError(400, f"admission webhook {hook['name']!r} does not support dry run")
        review = {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}
        try:
            answer = await self._call(hook["clientConfig"], hook.get("timeoutSeconds", 10), review)
            response: Object = answer["response"]
            if response.get("uid") != request["uid"]:
                raise ValueError(f"expected response.uid={request['uid']!r}, got {response.get('uid')!r}")  # noqa: TRY301
        except (httpx.HTTPError, ValueError, KeyError, TypeError, OSError) as error:
            if hook.get("failurePolicy") == "Ignore":
                return {"allowed": True}
            raise ApiError(500, f'Internal error occurred: failed calling webhook "{hook["name"]}": {error}') from error
        admission.options.warnings.extend(response.get("warnings") or [])
        if not response.get("allowed"):
            status = response.get("status") or {}
            text = status.get("message") or status.get("reason") or "denied without explanation"
            message = f'admission webhook "{hook["name"]}" denied the request' + (
                f": {text}" if status else " without explanation"
            )
            raise ApiError(status.get("code") or 403, message, status.get("reason") or "", status.get("details"))
        return response

    async def _request(self, hook: Object, admission: Admission, item: Object | None) -> Object:
        resource, options = admission.resource, admission.options
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        what = {"group": resource.group, "version": resource.version, "resource": resource.plural}
        namespace = {"namespace": admission.name[0]} if resource.namespaced else {}
        subresource = {"subResource": options.subresource} if options.subresource else {}
        return {
            "uid": str(uuid.uuid4()), "kind": kind, "resource": what, "requestKind": kind, "requestResource": what,
            "name": admission.name[1], **namespace, **subresource, "operation": admission.operation,
            "userInfo": options.user, "object": item, "oldObject": admission.old, "dryRun": options.dry_run,
            "options": {"kind": f"{admission.operation.capitalize()}Options", "apiVersion": "meta.k8s.io/v1"},
        }  # fmt: skip

    async def convert(self, resource: Resource, items: list[Object], api_version: str) -> list[Object]:
        """Return objects of a custom resource in another version."""
        definition = self._storage.get(("apiextensions.k8s.io", "customresourcedefinitions"), ("", resource.definition))
        assert definition is not None
        conversion = definition["spec"].get("conversion") or {}
        if conversion.get("strategy") != "Webhook":
            return [{**one, "apiVersion": api_version} for one in items]
        uid = str(uuid.uuid4())
        request = {"uid": uid, "desiredAPIVersion": api_version, "objects": items}
        review = {"kind": "ConversionReview", "apiVersion": "apiextensions.k8s.io/v1", "request": request}
        failed = f"conversion webhook for {items[0]['apiVersion']}, Kind={resource.kind} failed"
        try:
            answer = await self._call(conversion["webhook"]["clientConfig"], 30, review)
            response = answer["response"]
            result, converted = response["result"], response.get("convertedObjects") or []
        except (httpx.HTTPError, ValueError, KeyError, TypeError, OSError) as error:
            raise ApiError(500, f"{failed}: {error}") from error
        if result.get("status") != "Success":
            raise ApiError(500, f"{failed}: {result.get('message')}")
        if len(converted) != len(items) or response.get("uid") != uid:
            raise ApiError(500, f"{failed}: webhook returned {len(converted)} objects, expected {len(items)}")
        return [
            self._checked(resource, old, new, api_version, failed) for old, new in zip(items, converted, strict=True)
        ]

    def _checked(self, resource: Resource, old: Object, new: Object, api_version: str, failed: str) -> Object:
        """Return a converted object: pruned and defaulted; only labels and annotations of its metadata may change."""
        before, after = old["metadata"], new.get("metadata") or {}
        for name in ("name", "namespace", "uid"):
            if before.get(name) != after.get(name):
                raise ApiError(500, f"{failed}: must have the same {name}: {after.get(name)} != {before.get(name)}")
        if new.get("apiVersion") != api_version:
            raise ApiError(500, f"{failed}: apiVersion {new.get('apiVersion')} is not {api_version}")
        target = self._registry.version(resource.key, api_version)
        if target:
            new = target.schema.prune(new, "", [])
            target.schema.apply_defaults(new)
        changed = {name: after[name] for name in ("labels", "annotations") if name in after}
        kept = {name: one for name, one in before.items() if name not in {"labels", "annotations"}}
        return {**new, "metadata": {**kept, **changed}}

    async def _call(self, client: Object, timeout_s: float, review: Object) -> Any:
        pem = client.get("caBundle") or ""
        context = self._contexts.get(pem)
        if context is None:
            cadata = base64.b64decode(pem).decode()
            if not cadata:
                raise ValueError("x509: certificate signed by unknown authority: caBundle is empty")
            context = self._contexts[pem] = ssl.create_default_context(cadata=cadata)
        url, extensions = client.get("url"), {}
        if not url:
            service = client["service"]
            at = f"{service['namespace']}/{service['name']}"
            if at not in self.service_addresses:
                raise ValueError(f'service "{service["name"]}" not found')
            url = self.service_addresses[at] + (service.get("path") or "")
            extensions = {"sni_hostname": f"{service['name']}.{service['namespace']}.svc"}
        async with httpx.AsyncClient(verify=context, timeout=timeout_s) as http:
            answer = await http.post(url, json=review, extensions=extensions)
        if answer.status_code != 200:
            raise ValueError(
                f"an error on the server ({answer.text[:200]!r}) has prevented the request from succeeding"
            )
        return answer.json()


def _rule_matches(rule: Object, admission: Admission) -> bool:
    resource = admission.resource
    sub = admission.options.subresource
    name = f"{resource.plural}/{sub}" if sub else resource.plural
    names = rule.get("resources") or []
    by_name = (
        name in names
        or "*/*" in names
        or (not sub and "*" in names)
        or f"{resource.plural}/*" in names
        or (bool(sub) and f"*/{sub}" in names)
    )
    return (
        by_name
        and bool({"*", admission.operation} & set(rule.get("operations") or []))
        and bool({"*", resource.group} & set(rule.get("apiGroups") or []))
        and bool({"*", resource.version} & set(rule.get("apiVersions") or []))
        and rule.get("scope", "*") in {"*", "Namespaced" if resource.namespaced else "Cluster"}
    )
