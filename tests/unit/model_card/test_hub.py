"""A model is a directory, or a name on the hub; anything else is an error of one line."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from dynamo.core.errors import ConfigError
from dynamo.model_card.hub import resolve_model


@pytest.fixture
def failure(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Return a function with the hub's responses, in order."""
    failures: list[Exception] = []

    def download(name: str, **options: object) -> str:
        if failures:
            raise failures.pop(0)
        return f"/cache/{name}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return failures


def test_hub_uses_a_directory_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_model(tmp_path.name) == str(tmp_path)


def test_hub_downloads_a_model_by_name(failure: list[Exception]) -> None:
    assert resolve_model("owner/name") == "/cache/owner/name"


@pytest.mark.parametrize("name", ["/no/such/dir", "./absent", "a/b/c"])
def test_hub_is_not_contacted_for_a_path(failure: list[Exception], name: str) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        resolve_model(name)


def test_hub_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LocalEntryNotFoundError("long\nstory"), "the Hugging Face hub is unreachable"),
        (EntryNotFoundError("no entry\nmore"), "no entry"),
        (OSError("disk full\nmore"), "failed to download from the Hugging Face hub: disk full"),
    ],
)
def test_hub_error_is_one_line(failure: list[Exception], error: Exception, reason: str) -> None:
    failure.append(error)
    with pytest.raises(ConfigError) as refused:
        resolve_model("owner/name")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("model owner/name: ")


def test_hub_refuses_an_invalid_name() -> None:
    with pytest.raises(ConfigError, match="not a valid name on the Hugging Face hub"):
        resolve_model("--bad--name--")
