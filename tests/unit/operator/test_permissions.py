"""Permissions of the operator's account."""

from dynamo.operator.permissions import (
    CLUSTER_RULES,
    ELECTION_RULES,
    GPU_DISCOVERY_RULES,
    GRAPH_RULES,
    WORKLOAD_RULES,
    cells,
    granted,
    missing,
    rules_of,
)

EVERY = rules_of(GRAPH_RULES, WORKLOAD_RULES, CLUSTER_RULES, GPU_DISCOVERY_RULES, ELECTION_RULES)


def test_operator_holds_every_permission_that_it_grants() -> None:
    assert granted()
    assert missing(rules_of(GRAPH_RULES, WORKLOAD_RULES), granted()) == []


def test_permissions_have_no_wildcards_or_duplicates() -> None:
    found = [cell for rule in EVERY for cell in cells(rule)]
    assert not any("*" in cell for cell in found)
    # The rules of the election are for another namespace.
    together = rules_of(GRAPH_RULES, WORKLOAD_RULES, CLUSTER_RULES, GPU_DISCOVERY_RULES)
    once = [cell for rule in together for cell in cells(rule)]
    assert len(once) == len(set(once))
    assert {group for group, _, verb in found if verb == "deletecollection"} == set()


def test_missing_permission_names_group_resource_and_verb() -> None:
    rule = {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get", "deletecollection"]}
    assert missing(EVERY, [rule]) == [("apps", "deployments", "deletecollection")]
