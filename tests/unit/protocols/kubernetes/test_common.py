"""Metadata, conditions and the conversion of all API types."""

import msgspec
import pytest

from dynamo.protocols.kubernetes.common import (
    Condition,
    EppConfig,
    KvTransferPolicy,
    ObjectMeta,
    OwnerReference,
    RestartStatus,
    decode,
    encode,
)


def test_absent_fields_are_not_encoded() -> None:
    assert encode(ObjectMeta(name="a", generate_name="b-")) == {"name": "a", "generateName": "b-"}
    assert encode(decode(ObjectMeta, {"name": "a", "managedFields": []})) == {"name": "a"}


def test_owner_reference_always_has_every_field() -> None:
    reference = encode(OwnerReference("apps/v1", "Deployment", "a", "u"))
    assert reference == {
        "apiVersion": "apps/v1", "kind": "Deployment", "name": "a", "uid": "u",
        "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip


def test_wire_name_of_the_observed_id_is_in_capitals() -> None:
    assert encode(RestartStatus(observed_id="1")) == {"observedID": "1"}


@pytest.mark.parametrize(
    "value",
    [
        {"type": "Ready", "status": "yes", "reason": "r"},
        {"type": "Ready", "status": "True", "reason": ""},
        {"type": "Ready", "status": "True", "reason": "r", "observedGeneration": -1},
    ],
)
def test_invalid_condition_is_refused_with_its_path(value: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\."):
        decode(Condition, value)


def test_mutually_exclusive_fields_are_validation_rules() -> None:
    assert [rule.rule for rule in EppConfig.RULES] == ["has(self.configMapRef) != has(self.config)"]
    assert "clusterTopologyName" in KvTransferPolicy.RULES[0].rule
