"""Webhook configurations: kinds, failure policy, namespaces and definitions with conversion."""

from dynamo.operator.webhook_configurations import configurations, conversion_patch, converted_definitions


def test_configurations_cover_all_versions_and_fail_closed() -> None:
    mutating, validating = configurations("s", "n", "bundle")
    assert [len(one["webhooks"]) for one in (mutating, validating)] == [2, 6]
    for hook in validating["webhooks"]:
        assert (hook["failurePolicy"], hook["sideEffects"], hook["timeoutSeconds"]) == ("Fail", "None", 10)
        assert hook["clientConfig"]["caBundle"] == "bundle"
    graph = validating["webhooks"][0]["rules"][0]
    assert (graph["apiVersions"], graph["resources"]) == (["v1alpha1", "v1beta1"], ["dynamographdeployments"])
    assert not any("workermetadata" in hook["name"] for hook in validating["webhooks"])


def test_restricted_operator_has_its_own_configuration() -> None:
    wide, narrow = configurations("s", "n", "b")[1], configurations("s", "n", "b", ["team"])[1]
    assert wide["metadata"]["name"] != narrow["metadata"]["name"]
    expression = narrow["webhooks"][0]["namespaceSelector"]["matchExpressions"][0]
    assert expression["values"] == ["team"]


def test_definitions_with_two_versions_are_converted() -> None:
    assert len(converted_definitions()) == 4
    client = conversion_patch("s", "n", "b")["spec"]["conversion"]["webhook"]["clientConfig"]
    assert client["service"] == {"name": "s", "namespace": "n", "path": "/convert", "port": 443}
