"""DeploymentCard: upstream's `ModelDeploymentCard`, a read-only view of a model's card; and the id of its worker."""

import os

import msgspec

from dynamo.core.codec import UNREADABLE, json_decoder, json_encode
from dynamo.core.errors import InvalidArgument
from dynamo.model_card.card import architectural_context_length, build_card, read_json
from dynamo.model_card.types import ModelType
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.model_card import FileReference, ModelDeploymentCard

BLOCK_TOKENS = 16  # Block size of a card that no engine has registered yet.

_decode_card = json_decoder(ModelDeploymentCard).decode


class DeploymentCard:
    """Card of a model, created by `load` or `from_json_str`."""

    __slots__ = ("_card",)

    def __init__(self, card: ModelDeploymentCard) -> None:
        self._card = card

    @staticmethod
    def load(path: str, model_name: str) -> "DeploymentCard":
        """Return the card of a model directory. Raise `ConfigError` that names a missing or malformed file."""
        length = architectural_context_length(read_json(os.path.join(path, "config.json"))) or 0
        return DeploymentCard(
            build_card(path, model_name, context_length=length, kv_cache_block_size=BLOCK_TOKENS, model_type="")
        )

    @staticmethod
    def from_json_str(json: str) -> "DeploymentCard":
        """Return the card with this JSON form. Raise `InvalidArgument` for a malformed one."""
        try:
            return DeploymentCard(_decode_card(json.encode()))
        except UNREADABLE as error:
            raise InvalidArgument(f"model card: {error}", param="json") from None

    def to_json_str(self) -> str:
        """Return the JSON form of the card."""
        return json_encode(self._card).decode()

    def name(self) -> str:
        """Return the name under which the model is served."""
        return self._card.display_name

    def model_type(self) -> ModelType:
        """Return the APIs that the model serves."""
        found = ModelType.Empty
        for name in filter(None, (part.strip() for part in self._card.model_type.split("|"))):
            found |= ModelType[name]
        return found

    def source_path(self) -> str:
        """Return the directory or the hub's name of the model; its own name if it has no other."""
        return self._card.source_path or self._card.display_name

    def local_dir(self) -> str:
        """Return the directory of the model's files on this machine. Raise `InvalidArgument` if there is none."""
        files = (*self._references(self._card.model_info), *self._references(self._card.tokenizer))
        for file in files:
            if os.path.isfile(file.path):
                return os.path.dirname(os.path.abspath(file.path))
        raise InvalidArgument(f"model card of {self.name()}: its files are not on this machine")

    def runtime_config(self) -> object:
        """Return the capacities that the engine reports, as a dictionary."""
        return msgspec.to_builtins(self._card.runtime_config)

    @staticmethod
    def _references(files: dict[str, FileReference] | None) -> list[FileReference]:
        return list((files or {}).values())


class ModelCardInstanceId:
    """Worker that published a card."""

    __slots__ = ("_endpoint", "_instance_id")

    def __init__(self, endpoint: EndpointId, instance_id: int) -> None:
        self._endpoint = endpoint
        self._instance_id = instance_id

    def triple(self) -> tuple[str, str, str]:
        """Return namespace, component and endpoint of the worker."""
        return self._endpoint.namespace, self._endpoint.component, self._endpoint.name
