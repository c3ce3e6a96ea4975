"""The descriptions of a model's inputs and outputs."""

from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from dynamo.core.errors import ConfigError, NotFound
from dynamo.grpc.descriptions import check_tensor_config, config_of, is_tensor, metadata_of
from dynamo.grpc.messages import CLASSES
from dynamo.protocols.model_card import ModelDeploymentCard

TENSORS = {
    "name": "t",
    "inputs": [{"name": "a", "data_type": "Int32", "shape": [-1, 2]}],
    "outputs": [{"name": "b", "data_type": "Bytes", "shape": [1]}],
}


def card(model_type: str = "TensorBased", model_input: Any = "Tensor", **more: Any) -> ModelDeploymentCard:
    return ModelDeploymentCard(display_name="m", slug="m", model_type=model_type, model_input=model_input, **more)


def test_text_model_has_fixed_inputs_and_outputs() -> None:
    for model_input in ("Text", "Tokens"):
        text = card("Chat | Completions", model_input)
        assert not is_tensor(text)
        assert MessageToDict(metadata_of(text)) == {
            "name": "m",
            "versions": ["1"],
            "platform": "dynamo",
            "inputs": [
                {"name": "text_input", "datatype": "BYTES", "shape": ["1"]},
                {"name": "streaming", "datatype": "BOOL", "shape": ["1"]},
            ],
            "outputs": [
                {"name": "text_output", "datatype": "BYTES", "shape": ["-1"]},
                {"name": "finish_reason", "datatype": "BYTES", "shape": ["-1"]},
            ],
        }
        assert MessageToDict(config_of(text))["config"] == {
            "name": "m",
            "platform": "dynamo",
            "backend": "dynamo",
            "input": [
                {"name": "text_input", "dataType": 13, "dims": ["1"]},
                {"name": "streaming", "dataType": 1, "dims": ["1"], "optional": True},
            ],
            "output": [
                {"name": "text_output", "dataType": 13, "dims": ["-1"]},
                {"name": "finish_reason", "dataType": 13, "dims": ["-1"]},
            ],
        }


def test_tensor_model_has_the_inputs_and_outputs_of_its_card() -> None:
    tensors = card(tensor_model_config=TENSORS)
    assert is_tensor(tensors)
    message = MessageToDict(metadata_of(tensors))
    assert message["inputs"] == [{"name": "a", "datatype": "INT32", "shape": ["-1", "2"]}]
    assert message["outputs"] == [{"name": "b", "datatype": "BYTES", "shape": ["1"]}]
    assert MessageToDict(config_of(tensors))["config"]["output"] == [{"name": "b", "dataType": 13, "dims": ["1"]}]


def test_triton_model_config_takes_precedence() -> None:
    config = CLASSES["ModelConfig"](name="triton", platform="onnx", max_batch_size=8)
    config.input.add(name="x", data_type=11, dims=[3])
    unknown = b"\xa2\x06\x02hi"  # Field 100, which is none of ours.
    triton = card(tensor_model_config={**TENSORS, "triton_model_config": list(config.SerializeToString() + unknown)})
    message = config_of(triton).config
    assert (message.platform, message.max_batch_size, message.input[0].name) == ("onnx", 8, "x")
    assert message.SerializeToString().endswith(unknown)
    assert MessageToDict(metadata_of(triton))["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["3"]}]


def test_model_that_is_neither_text_nor_tensor_is_not_found() -> None:
    for other in (card("Chat", "Tokens"), card("TensorBased", "Text"), card("Embedding", "Tokens")):
        with pytest.raises(NotFound, match="neither"):
            metadata_of(other)
    with pytest.raises(NotFound, match="tensor_model_config"):
        config_of(card())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"inputs": [{"name": "a"}]}, "data_type"),
        ({"inputs": [{"name": "a", "data_type": "INT32", "shape": []}]}, "'INT32': expected one of Bool"),
        ({"inputs": 1}, "inputs"),
        ({"name": "t", "triton_model_config": [255]}, "not a serialized ModelConfig"),
        ({"name": "t", "triton_model_config": [42, 2, 16, 99]}, "an unknown data type"),
    ],
)
def test_invalid_tensor_model_config_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tensor_config(config)


def test_valid_tensor_model_config_is_accepted() -> None:
    check_tensor_config(TENSORS)
