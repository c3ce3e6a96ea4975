"""Messages are compatible with the published protocol definitions."""

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from dynamo.grpc.messages import CLASSES, DATA_TYPES, SERVICE, TABLE


def theirs(name: str) -> object:
    here = service_pb2 if hasattr(service_pb2, name.split(".")[0]) else model_config_pb2
    found = here
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", TABLE)
def test_fields_have_the_numbers_names_and_types_of_the_kserve_protocol(name: str) -> None:
    other = theirs(name).DESCRIPTOR
    for field in CLASSES[name].DESCRIPTOR.fields:
        there = other.fields_by_number[field.number]
        assert there.name == field.name
        assert there.type == (there.TYPE_ENUM if field.name == "data_type" else field.type)
        assert there.message_type is None or there.message_type.name == field.message_type.name
        assert (there.containing_oneof is None) == (field.containing_oneof is None)
    if "Model" not in name.split(".")[0][:5] or "Infer" in name:
        assert {field.number for field in CLASSES[name].DESCRIPTOR.fields} == set(other.fields_by_number)


def test_service_and_data_types_have_kserve_names() -> None:
    assert service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name == SERVICE
    spoken = [model_config_pb2.DataType.Name(number).removeprefix("TYPE_") for number in range(len(DATA_TYPES))]
    assert ["BYTES" if name == "STRING" else name for name in spoken] == list(DATA_TYPES)


def test_messages_are_compatible_with_the_generated_classes() -> None:
    mine = CLASSES["ModelInferRequest"](model_name="m", raw_input_contents=[b"\0"])
    mine.parameters["p"].uint64_param = 1 << 63
    mine.inputs.add(name="a", shape=[1, -1]).contents.bytes_contents.append(b"x")
    read = service_pb2.ModelInferRequest.FromString(mine.SerializeToString())
    assert (read.model_name, read.parameters["p"].uint64_param, list(read.inputs[0].shape)) == ("m", 1 << 63, [1, -1])
    assert CLASSES["ModelInferRequest"].FromString(read.SerializeToString()) == mine
