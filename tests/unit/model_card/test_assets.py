"""A card's files: shown by the worker, and named in the card by where they are shown."""

from pathlib import Path

import pytest

from dynamo.model_card.assets import PROCESSOR_FILE, has_remote, references, self_hosted
from dynamo.model_card.card import build_card, mdc_sum
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.model_card import ModelDeploymentCard

ENDPOINT = EndpointId("dynamo", "backend", "generate")


class Server:
    """System server that records its routes."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def show(self, path: str, file: str) -> str | None:
        self.files[path] = file
        return f"http://192.0.2.1:9090{path}"


@pytest.fixture
def card(model_dir: Path) -> ModelDeploymentCard:
    return build_card(str(model_dir), "My/Model", context_length=512, kv_cache_block_size=16)


def test_self_hosted_card_differs_only_in_its_urls(card: ModelDeploymentCard, model_dir: Path) -> None:
    server = Server()
    hosted = self_hosted(card, ENDPOINT, server.show)
    prefix = "/v1/metadata/dynamo/backend/generate/my_model/_base"
    assert hosted.tokenizer is not None
    assert hosted.tokenizer["hf_tokenizer_json"].path == f"http://192.0.2.1:9090{prefix}/tokenizer.json"
    assert server.files[f"{prefix}/tokenizer.json"] == str(model_dir / "tokenizer.json")
    assert len(server.files) == len(list(references(card)))
    assert has_remote(hosted)
    assert not has_remote(card)
    assert mdc_sum(hosted) == mdc_sum(card)
    assert [file.checksum for _, file in references(hosted)] == [file.checksum for _, file in references(card)]


def test_self_hosted_card_includes_the_processor_file(card: ModelDeploymentCard, model_dir: Path) -> None:
    server = Server()
    processor = model_dir / PROCESSOR_FILE
    processor.write_text("{}")
    try:
        hosted = self_hosted(card, ENDPOINT, server.show)
    finally:
        processor.unlink()
    prefix = "/v1/metadata/dynamo/backend/generate/my_model/_base"
    assert server.files[f"{prefix}/{PROCESSOR_FILE}"] == str(processor)
    assert PROCESSOR_FILE not in str(hosted)


def test_card_of_a_process_without_system_server_contains_paths(card: ModelDeploymentCard) -> None:
    assert self_hosted(card, ENDPOINT, lambda path, file: None) == card


def test_card_contains_paths_when_hosting_is_disabled(
    card: ModelDeploymentCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert self_hosted(card, ENDPOINT, Server().show, wanted=False) == card
    monkeypatch.setenv("DYN_SELF_HOST_METADATA", "false")
    assert self_hosted(card, ENDPOINT, Server().show) == card
    assert self_hosted(card, ENDPOINT, Server().show, wanted=True) != card


def test_self_hosted_card_serves_two_files_of_one_name(model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "tokenizer.json"
    template.write_text("{{ messages }}")
    card = build_card(str(model_dir), "m", context_length=9, kv_cache_block_size=1, custom_template=str(template))
    server = Server()
    self_hosted(card, ENDPOINT, server.show)
    assert set(server.files.values()) == {file.path for _, file in references(card)}
