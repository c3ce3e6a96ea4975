"""Behaviour of a Kubernetes API server on which the operator and discovery depend, on both servers."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.integration

Object = dict[str, Any]
names = (f"t{index}" for index in itertools.count())
APPLY = {"content-type": "application/apply-patch+yaml"}
MERGE = {"content-type": "application/merge-patch+json"}
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WIDGETS = "/apis/example.com/v1/namespaces/default/widgets"


def config_map(name: str, labels: Object | None = None, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels or {}}, "data": data}


def pod_template(**container: Any) -> Object:
    main = {"name": "main", "image": "registry/image:1", **container}
    return {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [main]}}


def deployment(name: str, replicas: int | None = 1, **container: Any) -> Object:
    spec: Object = {"selector": {"matchLabels": {"app": "web"}}, "template": pod_template(**container)}
    if replicas is not None:
        spec["replicas"] = replicas
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def widget(name: str, **spec: Any) -> Object:
    return {"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def widgets(api: httpx.Client) -> str:
    """Create a custom resource with defaults, rules and subresources, and return its path."""
    item = {
        "type": "object", "required": ["name"],
        "properties": {"name": {"type": "string"}, "value": {"type": "string"}, "port": {"type": "integer", "default": 80}},
    }  # fmt: skip
    spec = {
        "type": "object",
        "properties": {
            "replicas": {"type": "integer", "minimum": 0, "maximum": 10, "default": 1},
            "mode": {"type": "string", "enum": ["fast", "slow"]},
            "size": {"x-kubernetes-int-or-string": True},
            "fixed": {"type": "string", "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "fixed is immutable"}]},
            "items": {
                "type": "array", "items": item, "maxItems": 5, "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"]},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "services": {"type": "object", "maxProperties": 3, "additionalProperties": item},
            "low": {"type": "integer"}, "high": {"type": "integer"},
        },
        "x-kubernetes-validations": [
            {"rule": "!has(self.low) || !has(self.high) || self.low <= self.high", "message": "low must not exceed high"}],
    }  # fmt: skip
    status = {"type": "object", "properties": {"replicas": {"type": "integer"}, "selector": {"type": "string"}}}
    paths = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    version = {
        "name": "v1", "served": True, "storage": True, "subresources": {"status": {}, "scale": paths},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": status}}},
    }  # fmt: skip
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "widgets.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced", "versions": [version],
                 "names": {"plural": "widgets", "kind": "Widget", "shortNames": ["wd"]}},
    }  # fmt: skip
    assert api.post(CRDS, json=definition).status_code == 201
    until(lambda: api.get(WIDGETS).status_code == 200)
    return WIDGETS


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def watch(api: httpx.Client, path: str, **parameters: Any) -> Iterator[Object]:
    query = {"watch": "1", "timeoutSeconds": "3", **parameters}
    with api.stream("GET", path, params=query) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            yield json.loads(line)


def refusal(response: httpx.Response, code: int, reason: str) -> Object:
    body: Object = response.json()
    assert (response.status_code, body["code"], body["reason"]) == (code, code, reason), body
    assert (body["kind"], body["apiVersion"], body["status"]) == ("Status", "v1", "Failure")
    return body


def causes(response: httpx.Response) -> set[tuple[str, str]]:
    return {(one["field"], one["reason"]) for one in refusal(response, 422, "Invalid")["details"]["causes"]}


def test_request_without_token_is_refused(api: httpx.Client) -> None:
    response = api.get(CONFIG_MAPS, headers={"Authorization": "Bearer wrong"})
    refusal(response, 401, "Unauthorized")


def test_discovery_lists_resources_with_subresources(api: httpx.Client, widgets: str) -> None:
    groups = {one["name"]: one for one in api.get("/apis").json()["groups"]}
    assert groups["apps"]["preferredVersion"]["groupVersion"] == "apps/v1"
    listed = {one["name"]: one for one in api.get("/apis/example.com/v1").json()["resources"]}
    assert listed["widgets"]["shortNames"] == ["wd"]
    assert listed["widgets/scale"]["kind"] == "Scale"
    assert "watch" in {one["name"]: one for one in api.get("/api/v1").json()["resources"]}["pods"]["verbs"]
    assert api.get("/version").json()["major"] == "1"


def test_create_sets_system_fields_and_refuses_a_second_object(api: httpx.Client) -> None:
    name = next(names)
    response = api.post(CONFIG_MAPS, json=config_map(name))
    metadata = response.json()["metadata"]
    assert response.status_code == 201
    assert metadata["uid"]
    assert metadata["creationTimestamp"].endswith("Z")
    assert metadata["namespace"] == "default"
    assert "generation" not in metadata
    body = refusal(api.post(CONFIG_MAPS, json=config_map(name)), 409, "AlreadyExists")
    assert body["message"] == f'configmaps "{name}" already exists'
    assert body["details"] == {"name": name, "kind": "configmaps"}


def test_create_refuses_a_resource_version(api: httpx.Client) -> None:
    body = config_map(next(names))
    body["metadata"]["resourceVersion"] = "5"
    response = api.post(CONFIG_MAPS, json=body)
    assert (response.status_code, response.json()["message"]) == (
        500,
        "resourceVersion should not be set on objects to be created",
    )


def test_generate_name_appends_five_characters(api: httpx.Client) -> None:
    body = {"metadata": {"generateName": "web-"}}
    name = api.post(CONFIG_MAPS, json=body).json()["metadata"]["name"]
    assert name.startswith("web-")
    assert len(name) == 9


def test_name_is_required_and_checked(api: httpx.Client) -> None:
    assert causes(api.post(CONFIG_MAPS, json={"metadata": {}})) == {("metadata.name", "FieldValueRequired")}
    assert causes(api.post(CONFIG_MAPS, json=config_map("Web_1"))) == {("metadata.name", "FieldValueInvalid")}


def test_labels_are_checked(api: httpx.Client) -> None:
    body = config_map(next(names), {"a/b/c": "x", "ok": "y" * 64})
    assert causes(api.post(CONFIG_MAPS, json=body)) == {("metadata.labels", "FieldValueInvalid")}


def test_missing_objects_and_namespaces_are_not_found(api: httpx.Client) -> None:
    body = refusal(api.get(f"{CONFIG_MAPS}/absent"), 404, "NotFound")
    assert body["message"] == 'configmaps "absent" not found'
    assert body["details"] == {"name": "absent", "kind": "configmaps"}
    response = api.post("/api/v1/namespaces/nowhere/configmaps", json=config_map("a"))
    assert refusal(response, 404, "NotFound")["message"] == 'namespaces "nowhere" not found'
    assert api.get("/apis/example.org/v1/things").status_code == 404


def test_stale_update_conflicts(api: httpx.Client) -> None:
    name = next(names)
    first = api.post(CONFIG_MAPS, json=config_map(name, a="1")).json()
    second = api.put(f"{CONFIG_MAPS}/{name}", json={**first, "data": {"a": "2"}}).json()
    assert int(second["metadata"]["resourceVersion"]) > int(first["metadata"]["resourceVersion"])
    body = refusal(api.put(f"{CONFIG_MAPS}/{name}", json={**first, "data": {"a": "3"}}), 409, "Conflict")
    assert body["message"] == (
        f'Operation cannot be fulfilled on configmaps "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )


def test_update_without_change_is_no_write(api: httpx.Client) -> None:
    name = next(names)
    first = api.post(CONFIG_MAPS, json=config_map(name, a="1")).json()
    assert api.put(f"{CONFIG_MAPS}/{name}", json=first).json() == first
    assert api.patch(f"{CONFIG_MAPS}/{name}", json={"data": {"a": "1"}}, headers=MERGE).json() == first


def test_update_of_custom_object_needs_a_resource_version(api: httpx.Client, widgets: str) -> None:
    name = next(names)
    api.post(widgets, json=widget(name))
    assert causes(api.put(f"{widgets}/{name}", json=widget(name, replicas=2))) == {
        ("metadata.resourceVersion", "FieldValueInvalid")
    }


def test_generation_counts_changes_of_the_specification_only(api: httpx.Client, widgets: str) -> None:
    name = next(names)
    made = api.post(widgets, json={**widget(name, replicas=1), "status": {"replicas": 7}}).json()
    assert made["metadata"]["generation"] == 1
    assert "status" not in made
    labelled = api.patch(f"{widgets}/{name}", json={"metadata": {"labels": {"a": "b"}}}, headers=MERGE).json()
    assert labelled["metadata"]["generation"] == 1
    scaled = api.patch(
        f"{widgets}/{name}", json={"spec": {"replicas": 2}, "status": {"replicas": 7}}, headers=MERGE
    ).json()
    assert scaled["metadata"]["generation"] == 2
    assert "status" not in scaled
    reported = api.patch(
        f"{widgets}/{name}/status", json={"spec": {"replicas": 5}, "status": {"replicas": 7}}, headers=MERGE
    ).json()
    assert (reported["metadata"]["generation"], reported["spec"]["replicas"], reported["status"]) == (
        2,
        2,
        {"replicas": 7},
    )


def test_defaults_are_set_and_unknown_fields_pruned(api: httpx.Client, widgets: str) -> None:
    body = widget(next(names), bogus=1, free={"any": {"thing": 1}}, items=[{"name": "a", "extra": 2}], size="10%")
    spec = api.post(widgets, json=body).json()["spec"]
    assert spec == {"replicas": 1, "free": {"any": {"thing": 1}}, "items": [{"name": "a", "port": 80}], "size": "10%"}


def test_strict_field_validation_refuses_unknown_fields(api: httpx.Client, widgets: str) -> None:
    response = api.post(widgets, params={"fieldValidation": "Strict"}, json=widget(next(names), bogus=1))
    assert 'unknown field "spec.bogus"' in refusal(response, 400, "BadRequest")["message"]
    response = api.post(widgets, json=widget(next(names), bogus=1))
    assert response.headers["warning"] == '299 - "unknown field \\"spec.bogus\\""'


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"replicas": -1}, ("spec.replicas", "FieldValueInvalid")),
        ({"replicas": "1"}, ("spec.replicas", "FieldValueTypeInvalid")),
        ({"mode": "medium"}, ("spec.mode", "FieldValueNotSupported")),
        ({"items": [{"value": "x"}]}, ("spec.items[0].name", "FieldValueRequired")),
        ({"items": [{"name": "a"}, {"name": "a"}]}, ("spec.items[1]", "FieldValueDuplicate")),
        ({"items": [{"name": str(index)} for index in range(6)]}, ("spec.items", "FieldValueTooMany")),
        ({"low": 2, "high": 1}, ("spec", "FieldValueInvalid")),
        ({"services": {"a": {"value": "x"}}}, ("spec.services.a.name", "FieldValueRequired")),
    ],
)
def test_schema_violations_name_field_and_reason(
    api: httpx.Client, widgets: str, spec: Object, expected: tuple[str, str]
) -> None:
    assert expected in causes(api.post(widgets, json=widget(next(names), **spec)))


def test_transition_rule_refuses_a_change(api: httpx.Client, widgets: str) -> None:
    name = next(names)
    assert api.post(widgets, json=widget(name, fixed="a")).status_code == 201
    response = api.patch(f"{widgets}/{name}", json={"spec": {"fixed": "b"}}, headers=MERGE)
    assert causes(response) == {("spec.fixed", "FieldValueInvalid")}
    assert "fixed is immutable" in response.json()["message"]


def test_scale_subresource_reads_and_writes_replicas(api: httpx.Client, widgets: str) -> None:
    name = next(names)
    api.post(widgets, json=widget(name, replicas=2))
    api.patch(f"{widgets}/{name}/status", json={"status": {"replicas": 1, "selector": "a=b"}}, headers=MERGE)
    scale = api.get(f"{widgets}/{name}/scale").json()
    assert (scale["apiVersion"], scale["spec"], scale["status"]) == (
        "autoscaling/v1",
        {"replicas": 2},
        {"replicas": 1, "selector": "a=b"},
    )
    assert api.patch(f"{widgets}/{name}/scale", json={"spec": {"replicas": 3}}, headers=MERGE).json()["spec"] == {
        "replicas": 3
    }
    scale["spec"]["replicas"] = 4
    refusal(api.put(f"{widgets}/{name}/scale", json=scale), 409, "Conflict")
    assert api.get(f"{widgets}/{name}").json()["metadata"]["generation"] == 2


def test_selectors_filter_lists(api: httpx.Client) -> None:
    key = next(names)
    for name, value in (("a", "1"), ("b", "2"), ("c", "3")):
        api.post(CONFIG_MAPS, json=config_map(f"{key}-{name}", {key: value}))

    def found(**query: str) -> list[str]:
        listed = api.get(CONFIG_MAPS, params=query).json()
        return [one["metadata"]["name"].removeprefix(f"{key}-") for one in listed["items"]]

    assert found(labelSelector=f"{key}=1") == ["a"]
    assert found(labelSelector=f"{key} in (1, 2)") == ["a", "b"]
    assert found(labelSelector=f"{key},{key}!=2") == ["a", "c"]
    assert found(labelSelector=f"{key} notin (1),{key}") == ["b", "c"]
    assert found(fieldSelector=f"metadata.name={key}-c") == ["c"]
    refusal(api.get(CONFIG_MAPS, params={"labelSelector": "a==b=c"}), 400, "BadRequest")
    refusal(api.get(CONFIG_MAPS, params={"fieldSelector": "data.x=1"}), 400, "BadRequest")


def test_pages_are_of_one_revision(api: httpx.Client) -> None:
    key = next(names)
    for index in range(5):
        api.post(CONFIG_MAPS, json=config_map(f"{key}-{index}", {key: "x"}))
    query = {"labelSelector": key, "limit": "2"}
    page = api.get(CONFIG_MAPS, params=query).json()
    api.delete(f"{CONFIG_MAPS}/{key}-3")
    found = list(page["items"])
    while page["metadata"].get("continue"):
        page = api.get(CONFIG_MAPS, params={**query, "continue": page["metadata"]["continue"]}).json()
        found += page["items"]
    assert [one["metadata"]["name"] for one in found] == [f"{key}-{index}" for index in range(5)]
    assert page["kind"] == "ConfigMapList"
    refusal(api.get(CONFIG_MAPS, params={"limit": "2", "continue": "nonsense"}), 400, "BadRequest")


def test_future_resource_version_is_refused(api: httpx.Client) -> None:
    body = refusal(api.get(CONFIG_MAPS, params={"resourceVersion": "99999999"}), 504, "Timeout")
    assert body["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"


def test_watch_reports_changes_since_a_revision(api: httpx.Client) -> None:
    key = next(names)
    start = api.get(CONFIG_MAPS).json()["metadata"]["resourceVersion"]
    path = f"{CONFIG_MAPS}/{key}"
    api.post(CONFIG_MAPS, json=config_map(key, {key: "in"}))
    api.patch(path, json={"data": {"a": "1"}}, headers=MERGE)
    api.patch(path, json={"metadata": {"labels": {key: None}}}, headers=MERGE)
    api.patch(path, json={"metadata": {"labels": {key: "in"}}}, headers=MERGE)
    api.delete(path)
    events = list(watch(api, CONFIG_MAPS, resourceVersion=start, labelSelector=key))
    assert [one["type"] for one in events] == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
    revisions = [int(one["object"]["metadata"]["resourceVersion"]) for one in events]
    assert revisions == sorted(set(revisions))
    assert events[2]["object"]["metadata"]["labels"] == {key: "in"}
    assert events[0]["object"]["kind"] == "ConfigMap"


def test_watch_without_revision_begins_with_the_objects(api: httpx.Client) -> None:
    key = next(names)
    api.post(CONFIG_MAPS, json=config_map(key, {key: "in"}))
    events = list(watch(api, CONFIG_MAPS, labelSelector=key, timeoutSeconds="1"))
    assert [(one["type"], one["object"]["metadata"]["name"]) for one in events] == [("ADDED", key)]


def test_watch_list_ends_the_initial_events_with_a_bookmark(api: httpx.Client) -> None:
    key = next(names)
    api.post(CONFIG_MAPS, json=config_map(key, {key: "in"}))
    query = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "allowWatchBookmarks": "true"}
    events = list(watch(api, CONFIG_MAPS, labelSelector=key, timeoutSeconds="2", **query))
    if "RequestWatchProgress is disabled" in events[0]["object"].get("message", ""):
        pytest.skip("the etcd of this server is too old for streamed lists")
    assert [one["type"] for one in events][:2] == ["ADDED", "BOOKMARK"]
    assert events[1]["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


def test_apply_creates_then_merges_and_drops_what_it_no_longer_sets(api: httpx.Client) -> None:
    name = next(names)
    path = f"{CONFIG_MAPS}/{name}"
    query = {"fieldManager": "one"}
    assert api.patch(path, params=query, headers=APPLY, json=config_map(name, a="1", b="2")).status_code == 201
    api.patch(path, headers=MERGE, json={"data": {"c": "3"}})
    response = api.patch(path, params=query, headers=APPLY, json=config_map(name, a="1"))
    assert (response.status_code, response.json()["data"]) == (200, {"a": "1", "c": "3"})
    again = api.patch(path, params=query, headers=APPLY, json=config_map(name, a="1"))
    assert again.json() == response.json()


def test_apply_conflict_names_manager_and_field(api: httpx.Client) -> None:
    name = next(names)
    path = f"{DEPLOYMENTS}/{name}"
    api.patch(path, params={"fieldManager": "one"}, headers=APPLY, json=deployment(name, 1))
    response = api.patch(path, params={"fieldManager": "two"}, headers=APPLY, json=deployment(name, 2))
    body = refusal(response, 409, "Conflict")
    assert body["message"] == 'Apply failed with 1 conflict: conflict with "one": .spec.replicas'
    assert body["details"]["causes"] == [
        {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".spec.replicas"}
    ]
    forced = api.patch(path, params={"fieldManager": "two", "force": "true"}, headers=APPLY, json=deployment(name, 2))
    assert forced.json()["spec"]["replicas"] == 2
    owners = {
        one["manager"]
        for one in forced.json()["metadata"]["managedFields"]
        if "f:replicas" in one["fieldsV1"].get("f:spec", {})
    }
    assert owners == {"two"}


def test_apply_by_two_managers_merges_lists_by_key(api: httpx.Client) -> None:
    name = next(names)
    path = f"{DEPLOYMENTS}/{name}"
    api.patch(
        path, params={"fieldManager": "one"}, headers=APPLY, json=deployment(name, 1, env=[{"name": "A", "value": "1"}])
    )
    other = deployment(name, None, env=[{"name": "B", "value": "2"}])
    response = api.patch(path, params={"fieldManager": "two"}, headers=APPLY, json=other)
    container = response.json()["spec"]["template"]["spec"]["containers"][0]
    assert {one["name"] for one in container["env"]} == {"A", "B"}
    response = api.patch(path, params={"fieldManager": "one"}, headers=APPLY, json=deployment(name, 1))
    assert [one["name"] for one in response.json()["spec"]["template"]["spec"]["containers"][0]["env"]] == ["B"]


def test_update_takes_ownership_from_an_applier(api: httpx.Client, widgets: str) -> None:
    name = next(names)
    path = f"{widgets}/{name}"
    api.patch(path, params={"fieldManager": "one"}, headers=APPLY, json=widget(name, replicas=2))
    api.patch(path, params={"fieldManager": "kubectl"}, headers=MERGE, json={"spec": {"replicas": 3}})
    body = refusal(
        api.patch(path, params={"fieldManager": "one"}, headers=APPLY, json=widget(name, replicas=2)), 409, "Conflict"
    )
    assert (
        body["message"] == 'Apply failed with 1 conflict: conflict with "kubectl" using example.com/v1: .spec.replicas'
    )


def test_apply_needs_a_manager_and_no_managed_fields(api: httpx.Client) -> None:
    name = next(names)
    response = api.patch(f"{CONFIG_MAPS}/{name}", headers=APPLY, json=config_map(name))
    assert causes(response) == {("fieldManager", "FieldValueRequired")}
    body = config_map(name)
    body["metadata"]["managedFields"] = [{"manager": "x"}]
    response = api.patch(f"{CONFIG_MAPS}/{name}", params={"fieldManager": "x"}, headers=APPLY, json=body)
    assert refusal(response, 400, "BadRequest")["message"] == "metadata.managedFields must be nil"


def test_json_patch_tests_before_it_writes(api: httpx.Client) -> None:
    name = next(names)
    api.post(CONFIG_MAPS, json=config_map(name, a="1"))
    kind = {"content-type": "application/json-patch+json"}
    path = f"{CONFIG_MAPS}/{name}"
    refused = api.patch(
        path, headers=kind, json=[{"op": "test", "path": "/data/a", "value": "2"}, {"op": "remove", "path": "/data/a"}]
    )
    assert refused.status_code == 422
    done = api.patch(
        path,
        headers=kind,
        json=[{"op": "test", "path": "/data/a", "value": "1"}, {"op": "add", "path": "/data/b", "value": "2"}],
    )
    assert done.json()["data"] == {"a": "1", "b": "2"}


def test_strategic_merge_is_for_built_in_kinds_only(api: httpx.Client, widgets: str) -> None:
    kind = {"content-type": "application/strategic-merge-patch+json"}
    name = next(names)
    api.post(DEPLOYMENTS, json=deployment(name))
    patch = {
        "spec": {
            "template": {"spec": {"containers": [{"name": "main", "image": "new:1"}, {"name": "side", "image": "s:1"}]}}
        }
    }
    found = api.patch(f"{DEPLOYMENTS}/{name}", headers=kind, json=patch).json()["spec"]["template"]["spec"][
        "containers"
    ]
    assert {one["name"]: one["image"] for one in found} == {"main": "new:1", "side": "s:1"}
    api.post(widgets, json=widget(name))
    refusal(api.patch(f"{widgets}/{name}", headers=kind, json={}), 415, "UnsupportedMediaType")


def test_deployment_gets_the_defaults_of_the_server(api: httpx.Client) -> None:
    made = api.post(
        DEPLOYMENTS,
        json=deployment(next(names), readinessProbe={"httpGet": {"port": 80}}, ports=[{"containerPort": 80}]),
    ).json()
    spec = made["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}}
    assert (spec["revisionHistoryLimit"], spec["progressDeadlineSeconds"]) == (10, 600)
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"], pod["securityContext"]) == ("Always", 30, {})
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert container["ports"] == [{"containerPort": 80, "protocol": "TCP"}]
    assert container["readinessProbe"] == {
        "httpGet": {"path": "/", "port": 80, "scheme": "HTTP"}, "timeoutSeconds": 1, "periodSeconds": 10,
        "successThreshold": 1, "failureThreshold": 3,
    }  # fmt: skip


def test_bad_deployments_are_refused_with_field_paths(api: httpx.Client) -> None:
    mounted = deployment(next(names), volumeMounts=[{"name": "absent", "mountPath": "/x"}])
    assert ("spec.template.spec.containers[0].volumeMounts[0].name", "FieldValueNotFound") in causes(
        api.post(DEPLOYMENTS, json=mounted)
    )
    other = deployment(next(names))
    other["spec"]["selector"] = {"matchLabels": {"app": "other"}}
    assert ("spec.template.metadata.labels", "FieldValueInvalid") in causes(api.post(DEPLOYMENTS, json=other))
    typed = deployment(next(names))
    typed["spec"]["replicas"] = "three"
    refusal(api.post(DEPLOYMENTS, json=typed), 400, "BadRequest")
    name = next(names)
    api.post(DEPLOYMENTS, json=deployment(name))
    labels = {"spec": {"selector": {"matchLabels": {"x": "y"}}, "template": {"metadata": {"labels": {"x": "y"}}}}}
    assert ("spec.selector", "FieldValueInvalid") in causes(
        api.patch(f"{DEPLOYMENTS}/{name}", headers=MERGE, json=labels)
    )


def test_finalizer_delays_deletion(api: httpx.Client, widgets: str) -> None:
    name = next(names)
    body = widget(name)
    body["metadata"]["finalizers"] = ["example.com/hold"]
    made = api.post(widgets, json=body).json()
    marked = api.delete(f"{widgets}/{name}").json()
    assert marked["metadata"]["deletionTimestamp"]
    assert marked["metadata"]["generation"] == 2
    added = {"metadata": {"finalizers": ["example.com/hold", "example.com/late"]}}
    assert causes(api.patch(f"{widgets}/{name}", headers=MERGE, json=added)) == {
        ("metadata.finalizers", "FieldValueForbidden")
    }
    assert api.get(f"{widgets}/{name}").json()["metadata"]["uid"] == made["metadata"]["uid"]
    api.patch(f"{widgets}/{name}", headers=MERGE, json={"metadata": {"finalizers": None}})
    refusal(api.get(f"{widgets}/{name}"), 404, "NotFound")


def test_delete_checks_preconditions_and_reports_success(api: httpx.Client, widgets: str) -> None:
    name = next(names)
    made = api.post(widgets, json=widget(name)).json()
    wrong = {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    refusal(api.request("DELETE", f"{widgets}/{name}", json=wrong), 409, "Conflict")
    body = api.request("DELETE", f"{widgets}/{name}", json={"preconditions": {"uid": made["metadata"]["uid"]}}).json()
    assert (body["kind"], body["status"]) == ("Status", "Success")
    assert body["details"] == {"name": name, "group": "example.com", "kind": "widgets", "uid": made["metadata"]["uid"]}


def owned(name: str, owner: Object, *, block: bool = False) -> Object:
    body = config_map(name)
    body["metadata"]["ownerReferences"] = [{
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": block,
    }]  # fmt: skip
    return body


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
def test_dependents_are_collected_with_their_owner(api: httpx.Client, policy: str) -> None:
    name = next(names)
    owner = api.post(CONFIG_MAPS, json=config_map(name)).json()
    api.post(CONFIG_MAPS, json=owned(f"{name}-child", owner, block=True))
    api.request("DELETE", f"{CONFIG_MAPS}/{name}", json={"propagationPolicy": policy})
    until(lambda: api.get(f"{CONFIG_MAPS}/{name}-child").status_code == 404)
    until(lambda: api.get(f"{CONFIG_MAPS}/{name}").status_code == 404)


def test_orphaned_dependents_stay_without_owner(api: httpx.Client) -> None:
    name = next(names)
    owner = api.post(CONFIG_MAPS, json=config_map(name)).json()
    api.post(CONFIG_MAPS, json=owned(f"{name}-child", owner))
    time.sleep(0.5)  # The garbage collector of a released server learns of the child from a watch.
    api.request("DELETE", f"{CONFIG_MAPS}/{name}", json={"propagationPolicy": "Orphan"})
    until(lambda: api.get(f"{CONFIG_MAPS}/{name}").status_code == 404)
    assert not api.get(f"{CONFIG_MAPS}/{name}-child").json()["metadata"].get("ownerReferences")


def test_object_whose_owner_never_existed_is_collected(api: httpx.Client) -> None:
    name = next(names)
    ghost = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "ghost", "uid": "0b0b0b0b-0000-4000-8000-000000000000"},
    }
    api.post(CONFIG_MAPS, json=owned(name, ghost))
    until(lambda: api.get(f"{CONFIG_MAPS}/{name}").status_code == 404)


def test_dry_run_stores_nothing(api: httpx.Client) -> None:
    name = next(names)
    assert api.post(CONFIG_MAPS, params={"dryRun": "All"}, json=config_map(name)).status_code == 201
    refusal(api.get(f"{CONFIG_MAPS}/{name}"), 404, "NotFound")


def test_namespace_deletion_removes_its_content(api: httpx.Client) -> None:
    name = next(names)
    api.post("/api/v1/namespaces", json={"metadata": {"name": name}})
    api.post(f"/api/v1/namespaces/{name}/configmaps", json=config_map("a"))
    api.delete(f"/api/v1/namespaces/{name}")
    until(lambda: api.get(f"/api/v1/namespaces/{name}").status_code == 404)
    refusal(api.get(f"/api/v1/namespaces/{name}/configmaps/a"), 404, "NotFound")


def test_definition_must_be_structural(api: httpx.Client) -> None:
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {"type": "object", "properties": {"spec": {"properties": {"a": {"type": "string"}}}}}
        },
    }
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "gadgets.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced", "versions": [version], "names": {"plural": "gadgets", "kind": "Gadget"}},
    }  # fmt: skip
    found = causes(api.post(CRDS, json=definition))
    assert ("spec.validation.openAPIV3Schema.properties[spec].type", "FieldValueRequired") in found


@pytest.mark.parametrize(("approval", "code"), [(None, 422), ("yes", 422), ("unapproved, a test", 201)])
def test_definition_in_a_group_of_the_project_needs_an_approval(
    api: httpx.Client, approval: str | None, code: int
) -> None:
    schema = {"openAPIV3Schema": {"type": "object"}}
    item = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "parts.x.k8s.io", "annotations": {"api-approved.kubernetes.io": approval} if approval else {}},
        "spec": {"group": "x.k8s.io", "scope": "Namespaced", "names": {"plural": "parts", "kind": "Part"},
                 "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}]},
    }  # fmt: skip
    response = api.post(CRDS, json=item)
    assert response.status_code == code, response.text
    if code == 422:
        assert {field for field, _ in causes(response)} == {"metadata.annotations[api-approved.kubernetes.io]"}


def test_apply_refuses_a_field_that_the_definition_does_not_have(api: httpx.Client, widgets: str) -> None:
    name = next(names)
    value = {**widget(name), "status": {"unheard": 1}}
    refused = api.patch(f"{widgets}/{name}?fieldManager=a", headers=APPLY, content=json.dumps(value))
    assert refused.status_code == 500
    assert refused.json()["message"].endswith(", Kind=Widget): .status.unheard: field not declared in schema")


def test_loopback_address_of_an_endpoint_is_refused(api: httpx.Client) -> None:
    body = {
        "metadata": {"name": next(names)}, "addressType": "IPv4", "ports": [], "endpoints": [{"addresses": ["127.0.0.1"]}],
    }  # fmt: skip
    response = api.post("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", json=body)
    assert causes(response) == {("endpoints[0].addresses[0]", "FieldValueInvalid")}


def test_nulls_are_dropped_from_a_created_object_and_refused_in_an_apply(api: httpx.Client, widgets: str) -> None:
    name = next(names)
    made = api.post(widgets, json=widget(name, mode=None, free={"kept": None}))
    assert (made.status_code, made.json()["spec"]) == (201, {"free": {"kept": None}, "replicas": 1})
    other = widget(next(names), mode=None)
    applied = api.patch(f"{widgets}/{other['metadata']['name']}?fieldManager=m", headers=APPLY, json=other)
    assert ("spec.mode", "FieldValueTypeInvalid") in causes(applied)
