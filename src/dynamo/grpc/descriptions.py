"""Descriptions: metadata and configuration of a model's inputs and outputs, derived from its card. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError, NotFound
from dynamo.grpc.messages import CLASSES, DATA_TYPES
from dynamo.grpc.tensors import BY_NAME
from dynamo.protocols.model_card import ModelDeploymentCard

VERSION = "1"
PLATFORM = "dynamo"
TENSORS = "TensorBased"
COMPLETIONS = "Completions"


@dataclass(frozen=True, slots=True)
class Shown:
    """One input or output."""

    name: str
    datatype: str
    shape: Sequence[int]
    is_optional: bool = False


TEXT_INPUTS = (Shown("text_input", "BYTES", [1]), Shown("streaming", "BOOL", [1], is_optional=True))
TEXT_OUTPUTS = (Shown("text_output", "BYTES", [-1]), Shown("finish_reason", "BYTES", [-1]))
"""Outputs of every text model; each choice is an element of the outputs."""


class TensorDescription(msgspec.Struct):
    """One input or output as its worker describes it."""

    name: str
    data_type: str
    shape: list[int]


class TensorModelConfig(msgspec.Struct):
    """Description of a tensor model on its card."""

    name: str = ""
    inputs: list[TensorDescription] = []
    outputs: list[TensorDescription] = []
    triton_model_config: bytes | list[int] | None = None
    """A serialized `ModelConfig`, which replaces the other fields."""


def is_tensor(card: ModelDeploymentCard) -> bool:
    """Return whether the model takes tensors. Raise `NotFound` if it takes neither tensors nor text."""
    types = card.model_type.split(" | ")
    if TENSORS in types and card.model_input == "Tensor":
        return True
    if COMPLETIONS in types and card.model_input in ("Text", "Tokens"):
        return False
    raise NotFound(f"Model '{card.display_name}' serves neither completions nor tensors")


def metadata_of(card: ModelDeploymentCard) -> Any:
    """Return the `ModelMetadataResponse`. Raise `NotFound` and `ConfigError`."""
    name, inputs, outputs = _shown(card)
    message = CLASSES["ModelMetadataResponse"](name=name, versions=[VERSION], platform=PLATFORM)
    for target, shown in ((message.inputs, inputs), (message.outputs, outputs)):
        for one in shown:
            target.add(name=one.name, datatype=one.datatype, shape=one.shape)
    return message


def config_of(card: ModelDeploymentCard) -> Any:
    """Return the `ModelConfigResponse`. Raise `NotFound` and `ConfigError`."""
    if is_tensor(card):
        given = _tensor_config(card).triton_model_config
        if given is not None:
            return CLASSES["ModelConfigResponse"](config=_triton_config(bytes(given), card.display_name))
    name, inputs, outputs = _shown(card)
    config = CLASSES["ModelConfig"](name=name, platform=PLATFORM, backend=PLATFORM)
    for one in inputs:
        config.input.add(
            name=one.name, data_type=DATA_TYPES.index(one.datatype), dims=one.shape, optional=one.is_optional
        )
    for one in outputs:
        config.output.add(name=one.name, data_type=DATA_TYPES.index(one.datatype), dims=one.shape)
    return CLASSES["ModelConfigResponse"](config=config)


def check_tensor_config(value: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an invalid `tensor_model_config`."""
    card = ModelDeploymentCard(display_name="tensor_model_config", slug="", tensor_model_config=dict(value))
    config = _tensor_config(card)
    if config.triton_model_config is not None:
        _triton_config(bytes(config.triton_model_config), config.name)
    for one in (*config.inputs, *config.outputs):
        _datatype(one)


def _shown(card: ModelDeploymentCard) -> tuple[str, Sequence[Shown], Sequence[Shown]]:
    if not is_tensor(card):
        return card.display_name, TEXT_INPUTS, TEXT_OUTPUTS
    config = _tensor_config(card)
    if config.triton_model_config is not None:
        triton = _triton_config(bytes(config.triton_model_config), card.display_name)
        inputs = [Shown(one.name, DATA_TYPES[one.data_type], list(one.dims), one.optional) for one in triton.input]
        outputs = [Shown(one.name, DATA_TYPES[one.data_type], list(one.dims)) for one in triton.output]
        return triton.name, inputs, outputs
    return (
        config.name or card.display_name,
        [Shown(one.name, _datatype(one), one.shape) for one in config.inputs],
        [Shown(one.name, _datatype(one), one.shape) for one in config.outputs],
    )


def _tensor_config(card: ModelDeploymentCard) -> TensorModelConfig:
    if not card.tensor_model_config:
        raise NotFound(f"ModelConfig of '{card.display_name}' not found: its card has no tensor_model_config")
    try:
        return msgspec.convert(card.tensor_model_config, TensorModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"tensor_model_config of '{card.display_name}': {error}") from None


def _triton_config(data: bytes, name: str) -> Any:
    from google.protobuf.message import DecodeError

    config = CLASSES["ModelConfig"]()
    try:
        config.ParseFromString(data)
    except DecodeError as error:
        raise ConfigError(f"triton_model_config of '{name}' is not a serialized ModelConfig: {error}") from None
    if any(not 0 <= one.data_type < len(DATA_TYPES) for one in (*config.input, *config.output)):
        raise ConfigError(f"triton_model_config of '{name}' has an unknown data type")
    return config


def _datatype(one: TensorDescription) -> str:
    kind = BY_NAME.get(one.data_type)
    if kind is None:
        raise ConfigError(f"tensor {one.name!r} is {one.data_type!r}: expected one of {', '.join(BY_NAME)}")
    return kind.wire
