"""Checks of packages, versions and model files."""

from dataclasses import replace

import pytest

from dynamo.ops.doctor.facts import CheckpointFacts, Distribution, PackageFacts, PartFacts
from dynamo.ops.doctor.package_checks import checkpoint_row, package_rows, shortened, version_row
from dynamo.ops.report import CheckRow, CheckStatus

GOOD = Distribution(name="msgspec", specifier=">=0.19", installed="0.20")
NATS = Distribution(name="nats-py", specifier=">=2.15,<2.17", installed=None)
FACTS = PackageFacts(
    python=(3, 11, 7),
    implementation="CPython",
    executable="python",
    is_installed=True,
    version="1.6.1",
    metadata_version="1.6.1",
    required=(GOOD,),
    extras={"nats": (NATS,)},
    install={"": "pip install x", "nats": "pip install nats-py"},
)


def rows(facts: PackageFacts, **variables: str) -> dict[str, CheckRow]:
    return {row.check: row for row in package_rows(facts, variables)}


def test_healthy_environment_passes_and_lists_its_extras() -> None:
    found = rows(FACTS)
    assert {row.status for row in found.values()} == {CheckStatus.PASS}
    assert found["extras"].evidence == "installed: none; not installed: nats"


def test_old_python_fails() -> None:
    assert rows(replace(FACTS, python=(3, 10, 1)))["python"].status is CheckStatus.FAIL


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (replace(FACTS, required=(replace(GOOD, installed=None),)), CheckStatus.FAIL, "not installed: msgspec"),
        (
            replace(FACTS, required=(replace(GOOD, installed="0.1", is_accepted=False),)),
            CheckStatus.FAIL,
            "unsupported versions: msgspec 0.1 (needs >=0.19)",
        ),
        (replace(FACTS, metadata_version="1.5"), CheckStatus.WARN, "imported package is 1.6.1"),
        (replace(FACTS, is_installed=False), CheckStatus.SKIP, "not installed"),
    ],
)
def test_incompatible_packages_are_named(facts: PackageFacts, status: CheckStatus, words: str) -> None:
    row = rows(facts)["packages"]
    assert row.status is status
    assert words in row.evidence


def test_missing_extra_fails_only_if_a_setting_requires_it() -> None:
    row = rows(FACTS, DYN_EVENT_PLANE="nats")["extra nats"]
    assert (row.status, row.remedy) == (CheckStatus.FAIL, "run: pip install nats-py")
    assert "DYN_EVENT_PLANE=nats" in row.evidence


def test_unsupported_version_of_an_unused_extra_is_a_warning() -> None:
    facts = replace(FACTS, extras={"nats": (replace(NATS, installed="3", is_accepted=False),)})
    assert rows(facts)["extra nats"].status is CheckStatus.WARN


def test_versions_of_a_running_graph_are_compared() -> None:
    part = PartFacts(name="cpu (pid 1)", pid=1, version="1.6.1")
    assert version_row([], "", "1.6.1").status is CheckStatus.SKIP
    assert version_row([part], "1.6.1", "1.6.1").status is CheckStatus.PASS
    mixed = version_row([part, PartFacts(name="vllm (pid 2)", pid=2, version="1.5.0")], "", "1.6.1")
    assert mixed.status is CheckStatus.WARN
    assert "different releases" in mixed.evidence
    assert "this command is 1.7" in version_row([part], "", "1.7").evidence


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (CheckpointFacts(given="x", is_file=True), CheckStatus.FAIL, "is a file"),
        (CheckpointFacts(given="/m/x", nearest="/m/xy"), CheckStatus.FAIL, "no such directory"),
        (CheckpointFacts(given="a/b", is_name=True), CheckStatus.WARN, "Hugging Face hub"),
        (CheckpointFacts(given="a/b", is_name=True, is_offline=True), CheckStatus.FAIL, "HF_HUB_OFFLINE"),
        (CheckpointFacts(given="x", path="/x", config_error="no config.json"), CheckStatus.FAIL, "no config.json"),
        (CheckpointFacts(given="x", path="/x", missing=("a",)), CheckStatus.FAIL, "missing: a"),
        (CheckpointFacts(given="x", path="/x", placeholders=("a",)), CheckStatus.FAIL, "not downloaded: a"),
        (CheckpointFacts(given="x", path="/x"), CheckStatus.WARN, "no tokenizer.json"),
        (
            CheckpointFacts(given="x", path="/x", has_tokenizer=True, architecture="Llama", weights_bytes=1 << 30),
            CheckStatus.PASS,
            "Llama, 1.0 GiB",
        ),
    ],
)
def test_model_file_check_reports_each_state(facts: CheckpointFacts, status: CheckStatus, words: str) -> None:
    row = checkpoint_row(facts)
    assert row.status is status
    assert words in row.evidence


def test_nearest_directory_is_proposed() -> None:
    assert checkpoint_row(CheckpointFacts(given="/m/x", nearest="/m/xy")).remedy == "did you mean /m/xy?"


def test_long_lists_are_shortened() -> None:
    assert shortened(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 more"
