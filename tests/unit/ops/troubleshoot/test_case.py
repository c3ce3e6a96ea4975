"""Cases are read from the files of collections, of bundles, and of upstream's collector."""

import json

from dynamo.ops.troubleshoot.case import case_of, items_of, source_of, total, yaml_objects


def test_files_of_a_collection_become_facts() -> None:
    case = case_of(
        {
            "pods.json": json.dumps({"kind": "PodList", "items": [{"metadata": {"name": "p"}}]}),
            "pods/p/main.log": "\x1b[31merror\x1b[0m",
            "logs/run-1/worker-1.log": "line",
            "metrics.txt": "a 1",
            "health.json": '{"status": "healthy"}',
            "models.json": '{"data": [{"id": "m"}]}',
            "discovery.json": '[{"key": "v1/mdc/x", "value": "{\\"card_json\\": {\\"a\\": 1}}"}]',
            "processes.json": '[{"pid": 3, "module": "dynamo.cpu", "version": "1", "variables": {"A": "b"}}]',
            "report.json": '{"rows": [{"check": "c", "status": "FAIL", "evidence": "e", "remedy": "r"}]}',
            "packages.txt": "x==1",
            "README.txt": "error",
        }
    )
    assert case.logs == {"pod/p/main": "error", "run-1/worker-1.log": "line"}
    assert case.of("Pod") == ({"metadata": {"name": "p"}},)
    assert case.metrics == {"metrics.txt": "a 1"}
    assert case.health == {"status": "healthy"}
    assert case.models == ("m",)
    assert case.records[0].card == {"a": 1}
    assert (case.processes[0].name, case.processes[0].variables) == ("dynamo.cpu (pid 3)", {"A": "b"})
    assert case.failures == (("c", "e", "r"),)
    assert (
        case.summary
        == "2 logs, 1 Pod objects, 1 discovery records, 1 processes, 1 metrics pages, 1 failed checks, /health"
    )


def test_files_of_the_upstream_collector_are_read() -> None:
    case = case_of(
        {
            "g.yaml": "kind: DynamoGraphDeployment\nmetadata: {name: g}\n",
            "events.txt": "Warning Failed pod/x ErrImagePull",
            "describe-x.txt": "State: Waiting",
            "logs-x.txt": "line",
            "conditions.txt": "[]",
        }
    )
    assert case.of("DynamoGraphDeployment")[0]["metadata"] == {"name": "g"}
    assert set(case.logs) == {"events.txt", "pod/x"}


def test_malformed_files_are_ignored_and_an_empty_case_is_recognised() -> None:
    case = case_of({"pods.json": "{", "health.json": "x", "models.json": "[]", "discovery.json": "3", "g.yaml": "a: ["})
    assert case.is_empty
    assert case.models is None
    assert case.summary == "nothing"
    assert not case_of({"a.log": "x"}).is_empty


def test_lists_and_documents_are_flattened() -> None:
    assert items_of('{"items": [{"a": 1}, 2]}') == [{"a": 1}]
    assert [one["kind"] for one in yaml_objects("kind: List\nitems: [{kind: Pod}]\n---\nkind: Job\n---\n- 1\n")] == [
        "List",
        "Job",
        "Pod",
    ]
    assert source_of("bug/logs/a.log") == "logs/a.log"


TEXT = """\
# HELP a_total Help
# TYPE a_total counter
a_total{x="1",y="2"} 3
a_total{x="2"} 4 1700000000
a_total_more 100
plain 5
broken{x="1"} word
"""


def test_samples_of_a_family_are_added() -> None:
    assert total(TEXT, "a_total") == 7
    assert total(TEXT, "a_total", {"x": "1"}) == 3
    assert total(TEXT, "a_total", {"x": "9"}) == 0
    assert total(TEXT, "plain") == 5


def test_absent_family_and_malformed_samples_have_no_sum() -> None:
    assert total(TEXT, "absent") is None
    assert total(TEXT, "broken") is None
