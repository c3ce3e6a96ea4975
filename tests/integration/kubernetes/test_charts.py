"""Helm charts: lint, schema, rendering, and agreement with what `dynamo deploy` and the operator use."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import chart as helm
from helm_python.errors import HelmError
from tools import charts

from dynamo.core.config import load
from dynamo.operator import permissions
from dynamo.operator.process import OperatorOptions
from dynamo.operator.webhook_configurations import WebhookAddress, configurations
from dynamo.protocols.kubernetes.crds import manifests

pytestmark = pytest.mark.integration

CHARTS = Path(__file__).parents[3] / "deploy" / "helm" / "charts"
SYSTEM = "dynamo-system"
KUBERNETES = "1.34"
EVERYTHING = {
    "global": {"nats": {"install": True, "storageClassName": "fast"}, "etcd": {"install": True}},
    "dynamo-operator": {
        "namespaceRestriction": {"enabled": True, "targetNamespace": "team"},
        "imagePullSecrets": ["pull"],
        "serviceAccount": {"annotations": {"a": "b"}},
        "modelExpressURL": "http://express:8001",
        "dynamo": {"metrics": {"prometheusEndpoint": "http://prometheus:9090"}},
        "controllerManager": {
            "replicas": 2,
            "manager": {"args": ["--workers=8"], "image": {"tag": "x"}},
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
        },
    },
}
CASES = {
    "defaults": {},
    "everything": EVERYTHING,
    "no webhooks": {"dynamo-operator": {"webhook": {"enabled": False}, "upgradeCRD": False, "gpuDiscovery": {"enabled": False}}},
    "no operator": {"dynamo-operator": {"enabled": False}},
    "etcd discovery": {"global": {"etcd": {"install": True}}, "dynamo-operator": {"discoveryBackend": "etcd"}},
}  # fmt: skip
Object = dict[str, Any]


def rendered(name: str, values: Object | None = None) -> list[Object]:
    """Return the objects of a chart."""
    with helm.Chart.load(str(CHARTS / name)) as loaded:
        loaded.validate_schema(values or {})
        files = loaded.render(values or {}, name="dynamo-platform", namespace=SYSTEM)
    texts = [text for path, text in files.items() if not path.endswith("NOTES.txt")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def by_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


@pytest.mark.parametrize("name", ["dynamo-crds", "dynamo-platform"])
def test_chart_has_no_lint_findings(name: str) -> None:
    report = helm.lint(str(CHARTS / name), strict=True)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"] if one["severity"] > 1] == []


def test_generated_parts_are_current() -> None:
    assert [str(path) for path, text in charts.contents().items() if path.read_text() != text] == []


@pytest.mark.parametrize("case", CASES)
def test_objects_are_valid_by_kubernetes_schemas(case: str) -> None:
    for one in rendered("dynamo-platform", CASES[case]):
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_definitions_equal_those_of_deploy_crds() -> None:
    found = by_kind(rendered("dynamo-crds"), "CustomResourceDefinition")
    assert len(found) == 7
    for _, wanted in manifests():
        own = found[wanted["metadata"]["name"]]
        assert own["spec"] == wanted["spec"]
        assert own["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    other = rendered("dynamo-crds", {"conversion": {"namespace": "n", "service": "s"}, "keepOnUninstall": False})
    services = [
        one["spec"]["conversion"]["webhook"]["clientConfig"]["service"] for one in other if "conversion" in one["spec"]
    ]
    assert {(one["namespace"], one["name"]) for one in services} == {("n", "s")}
    assert not any("annotations" in one["metadata"] for one in other)


def test_webhooks_are_those_that_the_operator_maintains() -> None:
    found = rendered("dynamo-platform")
    for wanted in configurations(WebhookAddress("dynamo-operator-webhook-service", SYSTEM), "x"):
        own = by_kind(found, wanted["kind"])[wanted["metadata"]["name"]]
        for hook in wanted["webhooks"]:
            del hook["clientConfig"]["caBundle"]
        assert own["webhooks"] == wanted["webhooks"]
    narrow = rendered("dynamo-platform", EVERYTHING)
    for wanted in configurations(WebhookAddress("dynamo-operator-webhook-service", SYSTEM), "x", ["team"]):
        own = by_kind(narrow, wanted["kind"])[wanted["metadata"]["name"]]
        assert [one["namespaceSelector"] for one in own["webhooks"]] == [
            one["namespaceSelector"] for one in wanted["webhooks"]
        ]


def test_roles_are_the_declared_permissions() -> None:
    found = rendered("dynamo-platform")
    roles = by_kind(found, "ClusterRole") | by_kind(found, "Role")
    every = [rule for role in roles.values() for rule in role["rules"]]
    groups = (
        permissions.GRAPH_RULES, permissions.WORKLOAD_RULES, permissions.CLUSTER_RULES, permissions.GPU_DISCOVERY_RULES,
        permissions.ELECTION_RULES,
    )  # fmt: skip
    assert sorted(map(str, every)) == sorted(map(str, permissions.rules_of(*groups)))
    bindings = by_kind(found, "ClusterRoleBinding") | by_kind(found, "RoleBinding")
    assert {one["roleRef"]["name"] for one in bindings.values()} == set(roles)
    narrow = by_kind(rendered("dynamo-platform", EVERYTHING), "ClusterRole")
    assert not any("deployments" in rule["resources"] for role in narrow.values() for rule in role["rules"])


@pytest.mark.parametrize("case", CASES)
def test_operator_accepts_its_arguments(case: str) -> None:
    for one in by_kind(rendered("dynamo-platform", CASES[case]), "Deployment").values():
        (container,) = one["spec"]["template"]["spec"]["containers"]
        options = load(OperatorOptions, container["args"], {}, prog="operator")
        if case == "everything":
            assert options.nats_address == f"nats://dynamo-platform-nats.{SYSTEM}.svc:4222"
            assert (options.namespace, options.workers, options.upgrade_crds) == ("team", 8, True)
        assert container["image"].endswith(":x" if case == "everything" else ":1.6.1")


def test_nats_and_etcd_are_off_by_default() -> None:
    assert by_kind(rendered("dynamo-platform"), "StatefulSet") == {}
    assert set(by_kind(rendered("dynamo-platform", EVERYTHING), "StatefulSet")) == {
        "dynamo-platform-nats",
        "dynamo-platform-etcd",
    }


@pytest.mark.parametrize("name", ["dynamo-crds", "dynamo-platform"])
def test_every_value_has_a_comment(name: str) -> None:
    lines = (CHARTS / name / "values.yaml").read_text().splitlines()
    bare = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if re.match(r"\s*[\w-]+:", line) and not before.strip().startswith("#")
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dynamo-operator": {"replicas": 2}}, "additional properties 'replicas' not allowed"),
        ({"dynamo-operator": {"enabled": "yes"}}, "got string, want boolean"),
        ({"dynamo-operator": {"discoveryBackend": "zookeeper"}}, "kubernetes.*etcd"),
        ({"dynamo-operator": {"controllerManager": {"replicas": 0}}}, "minimum"),
        ({"global": {"grove": {"install": True}}}, "global.grove.install: this chart does not install grove"),
        ({"dynamo-operator": {"discoveryBackend": "etcd"}}, "requires dynamo-operator.etcdAddr or global.etcd.install=true"),
        ({"dynamo-operator": {"webhook": {"certManager": {"enabled": True}}}}, "issues and renews its own certificates"),
    ],
)  # fmt: skip
def test_value_that_cannot_have_an_effect_is_refused_with_its_name(values: Object, message: str) -> None:
    with pytest.raises(HelmError, match=message):
        rendered("dynamo-platform", values)
