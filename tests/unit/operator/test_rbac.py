"""Rights of the operator: what the accounts that it makes may do is among them, and nothing is granted by wildcard."""

from dynamo.k8s.kinds import GRAPHS, SERVICES
from dynamo.operator.rbac import Access, cluster_rules, manifest, rules
from dynamo.operator.reconcile.accounts import DISCOVERY_RULES, PLANNER_RULES
from dynamo.protocols.kubernetes.common import KubeObject


def allowed(found: list[KubeObject]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in found
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_rights_that_the_operator_grants_are_its_own() -> None:
    assert allowed(DISCOVERY_RULES) | allowed(PLANNER_RULES) <= allowed(cluster_rules())


def test_nothing_is_granted_by_wildcard_and_no_resource_is_named_twice() -> None:
    found = cluster_rules()
    assert "*" not in {part for one in allowed(found) for part in one}
    named = [(rule["apiGroups"][0], resource) for rule in found for resource in rule["resources"]]
    assert len(named) == len(set(named))


def test_secrets_are_read_in_the_operators_namespace_only() -> None:
    assert "secrets" not in {resource for _, resource, _ in allowed(cluster_rules())}
    role = next(one for one in manifest("home") if one["kind"] == "Role")
    assert role["metadata"]["namespace"] == "home"
    assert ("", "secrets", "get") in allowed(role["rules"])


def test_verbs_of_one_resource_are_united_and_resources_with_equal_verbs_share_a_rule() -> None:
    made = rules(
        [Access(SERVICES, ("get",)), Access(GRAPHS, ("get",), {"status": ("patch",)})],
        [{"apiGroups": [""], "resources": ["services", "pods"], "verbs": ["get", "list"]}],
    )
    assert made == [
        {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["get", "list"]},
        {"apiGroups": ["nvidia.com"], "resources": ["dynamographdeployments"], "verbs": ["get"]},
        {"apiGroups": ["nvidia.com"], "resources": ["dynamographdeployments/status"], "verbs": ["patch"]},
    ]
