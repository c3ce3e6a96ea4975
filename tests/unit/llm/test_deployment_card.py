"""Upstream's view of a model card."""

import json

import pytest

from dynamo._core import ModelDeploymentCard
from dynamo.core.errors import InvalidArgument
from dynamo.llm import ModelCardInstanceId, ModelType
from dynamo.protocols.discovery import EndpointId

CARD = {"display_name": "m", "slug": "m", "model_type": "Chat | Completions", "source_path": "org/m"}


def test_card_is_read_from_json_and_written_back() -> None:
    card = ModelDeploymentCard.from_json_str(json.dumps(CARD))
    assert (card.name(), card.source_path()) == ("m", "org/m")
    assert card.model_type() == ModelType.Chat | ModelType.Completions
    assert card.runtime_config()["data_parallel_size"] == 1
    assert ModelDeploymentCard.from_json_str(card.to_json_str()).name() == "m"


def test_malformed_card_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="display_name"):
        ModelDeploymentCard.from_json_str("{}")


def test_card_without_local_files_has_no_directory() -> None:
    with pytest.raises(InvalidArgument, match="not on this machine"):
        ModelDeploymentCard.from_json_str(json.dumps(CARD)).local_dir()


def test_instance_id_names_its_endpoint() -> None:
    assert ModelCardInstanceId(EndpointId("ns", "c", "e"), 7).triple() == ("ns", "c", "e")
