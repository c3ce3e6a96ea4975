"""Messages: the file description that reflection returns is complete."""

from dynamo.dc_relay.messages import CLASSES, FILE, METHODS, number_of


def test_every_streaming_method_has_its_request_and_response() -> None:
    (service,) = FILE.service
    assert [method.name for method in service.method] == ["GetRelayInfo", *METHODS]
    for method in service.method:
        assert method.input_type.rpartition(".")[2] in CLASSES
        assert method.output_type.rpartition(".")[2] in CLASSES


def test_contract_marker_has_its_number_in_every_request_and_response() -> None:
    for name in ("RelayInfo", "RelayInfoRequest", *METHODS.values(), *(f"{name}Request" for name in METHODS)):
        assert CLASSES[name].DESCRIPTOR.fields_by_name["contract_marker"].number == 127


def test_enumerations_have_the_numbers_of_the_protocol() -> None:
    assert number_of("WorkerRole", "LEGACY") == 5
    assert number_of("ServingReadinessState", "READY") == 2
    assert number_of("KvQueryHashFormat", "DYNAMO_EAGLE_V1") == 2


def test_absent_pool_of_a_member_differs_from_an_empty_one() -> None:
    assert not CLASSES["TopologyMember"]().HasField("pool_id")
