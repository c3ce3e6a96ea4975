"""NamespaceFile: valid and invalid files, and changes while the relay runs."""

from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.dc_relay.namespace_file import NamespaceFile

VALID = '{"version":1,"sources":[{"namespace":"a"}]}'


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"version":2,"sources":[]}',
        '{"version":1,"sources":[],"more":1}',
        '{"version":1,"sources":[{"namespace":"a"},{"namespace":"a"}]}',
        '{"version":1,"sources":[{"namespace":""}]}',
        '{"version":1,"connectionRevision":"5","sources":[]}',
    ],
)
def test_unusable_file_is_an_error_at_the_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sources.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="sources_file"):
        NamespaceFile(str(path), None).load()


def test_absent_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        NamespaceFile(str(tmp_path / "none"), None).load()


def test_file_with_the_revision_of_the_relay_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "sources.json"
    path.write_text('{"version":1,"connectionRevision":"5","sources":[]}')
    assert not NamespaceFile(str(path), "5").load()


def test_invalid_update_keeps_the_selection_until_a_valid_one(tmp_path: Path) -> None:
    path = tmp_path / "sources.json"
    path.write_text(VALID)
    file = NamespaceFile(str(path), None)
    assert file.load()
    assert not file.reload()
    path.write_text("{")
    assert not file.reload()
    assert file.namespaces == {"a"}
    assert file.last_error is not None
    assert file.desired_revision != file.applied_revision
    path.write_text('{"version":1,"sources":[{"namespace":"b"}]}')
    assert file.reload()
    assert (file.namespaces, file.last_error) == (frozenset({"b"}), None)
