"""Command lines: the processes of a graph as lines for a shell and as JSON."""

import json

from tests.unit.cli.test_graph import place

from dynamo.cli.command_lines import as_commands, as_json
from dynamo.cli.graph import Graph, plan


def secret_graph() -> Graph:
    return plan(
        place(),
        engine="cpu",
        workers=2,
        engine_flags=["--model-path=/a b"],
        key_variables={"DYN_API_KEYS": "secret-1", "DYN_ADMIN_API_KEYS": "secret-2"},
    )


def test_command_lines_contain_no_keys() -> None:
    text = as_commands(secret_graph())
    assert text.count("# worker-") == 2
    assert "-m dynamo.cpu '--model-path=/a b'" in text
    assert "secret" not in text


def test_json_has_commands_variables_and_gpus_without_keys() -> None:
    text = as_json("g", secret_graph(), {"worker-1": 2}, ["a note"])
    found = json.loads(text)
    assert "secret" not in text
    assert [one["gpus"] for one in found["processes"]] == [2, 0, 0]
    assert found["processes"][2]["command"][3] == "dynamo.frontend"
    assert found["notes"] == ["a note"]
