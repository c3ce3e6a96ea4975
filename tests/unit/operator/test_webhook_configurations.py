"""Webhook configurations: kinds, failure policy, namespaces and definitions with conversion."""

from dynamo.operator.webhook_configurations import (
    WebhookAddress,
    configurations,
    conversion_patch,
    converted_definitions,
)

ADDRESS = WebhookAddress("s", "n")


def test_configurations_cover_all_versions_and_fail_closed() -> None:
    mutating, validating = configurations(ADDRESS, "bundle")
    assert [len(one["webhooks"]) for one in (mutating, validating)] == [2, 6]
    for hook in validating["webhooks"]:
        assert (hook["failurePolicy"], hook["sideEffects"], hook["timeoutSeconds"]) == ("Fail", "None", 10)
        assert hook["clientConfig"]["caBundle"] == "bundle"
    graph = validating["webhooks"][0]["rules"][0]
    assert (graph["apiVersions"], graph["resources"]) == (["v1alpha1", "v1beta1"], ["dynamographdeployments"])
    assert not any("workermetadata" in hook["name"] for hook in validating["webhooks"])


def test_restricted_operator_has_its_own_configuration() -> None:
    wide, narrow = configurations(ADDRESS, "b")[1], configurations(ADDRESS, "b", ["team"])[1]
    assert wide["metadata"]["name"] != narrow["metadata"]["name"]
    expression = narrow["webhooks"][0]["namespaceSelector"]["matchExpressions"][0]
    assert expression["values"] == ["team"]


def test_definitions_with_two_versions_are_converted() -> None:
    assert len(converted_definitions()) == 4
    client = conversion_patch(ADDRESS, "b")["spec"]["conversion"]["webhook"]["clientConfig"]
    assert client["service"] == {"name": "s", "namespace": "n", "path": "/convert", "port": 443}


def test_webhooks_of_a_process_outside_the_cluster_have_its_url() -> None:
    outside = WebhookAddress("s", "n", "https://10.0.0.5:9443")
    validating = configurations(outside, "b")[1]["webhooks"][0]
    assert validating["clientConfig"] == {
        "url": "https://10.0.0.5:9443/validate-dynamographdeployment",
        "caBundle": "b",
    }
    client = conversion_patch(outside, "b")["spec"]["conversion"]["webhook"]["clientConfig"]
    assert (client["url"], client["service"]) == ("https://10.0.0.5:9443/convert", None)
