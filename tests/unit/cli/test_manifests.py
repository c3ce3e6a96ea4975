"""Manifests: documents, lists, damaged files, and the order of creation."""

from pathlib import Path

import pytest

from dynamo.cli.manifests import Manifest, check_manifests, in_order, read_files, read_manifests
from dynamo.core.errors import ConfigError
from dynamo.operator.validation.facts import AdmissionFacts


def test_documents_and_lists_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("kind: A\nmetadata: {name: a}\n---\n---\nkind: BList\nitems: [{kind: B}]\n")
    (tmp_path / "c.json").write_text('{"kind": "C"}')
    (tmp_path / "notes.txt").write_text("no manifest")
    assert [one.label for one in read_manifests([str(tmp_path)])] == ["A/a", "B/?", "C/?"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", r"a.yaml: line \d not YAML"), ("- a", "a document is a list"), ("", "no Kubernetes object")],
)
def test_damaged_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_manifests([str(tmp_path / "a.yaml")])


def test_referenced_objects_are_created_first() -> None:
    kinds = ["DynamoGraphDeployment", "PersistentVolumeClaim", "Job", "Namespace"]
    ordered = in_order(Manifest("f", {"kind": kind}) for kind in kinds)
    assert [one.kind for one in ordered] == ["Namespace", "PersistentVolumeClaim", "DynamoGraphDeployment", "Job"]


def test_object_without_kind_is_a_problem() -> None:
    problems, _, checked = check_manifests([Manifest("f", {"metadata": {"name": "x"}})], AdmissionFacts())
    assert (problems, checked) == (["f: object/x: apiVersion and kind are required, each a string"], 0)


def test_files_of_a_directory_that_are_no_manifests_are_skipped_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("{apiVersion: v1, kind: A, metadata: {name: a}}")
    (tmp_path / "b.yaml").write_text("a: {{ .Values.a }}\n")
    (tmp_path / "values.yaml").write_text("replicas: 1\n")
    (tmp_path / "wrong.yaml").write_text("a: [\n")
    (tmp_path / "worse.yaml").write_text("a: ]\n")
    found = read_files([str(tmp_path)])
    assert [one.label for one in found.manifests] == ["A/a"]
    assert found.skipped == [f"{tmp_path}/b.yaml: a template ({{{{)", f"{tmp_path}/values.yaml: no apiVersion and kind"]
    assert [text.partition(" not YAML")[0] for text in found.problems] == [
        f"{tmp_path}/worse.yaml: line 1",
        f"{tmp_path}/wrong.yaml: line 2",
    ]
    with pytest.raises(ConfigError, match=r"worse.yaml: .* \(and 1 more files\)"):
        read_manifests([str(tmp_path)])


def test_named_file_is_never_skipped(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("replicas: 1\n")
    (tmp_path / "b.yaml").write_text("a: {{ .Values.a }}\n")
    (one,) = read_files([f"{tmp_path}/values.yaml"]).manifests
    assert check_manifests([one], AdmissionFacts())[0] == [
        f"{tmp_path}/values.yaml: object/?: apiVersion and kind are required, each a string"
    ]
    assert (
        read_files([f"{tmp_path}/b.yaml", f"{tmp_path}/absent"])
        .problems[1]
        .startswith(f"{tmp_path}/absent: cannot be read")
    )
