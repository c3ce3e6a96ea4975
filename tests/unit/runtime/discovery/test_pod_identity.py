"""Identity of a process in a pod."""

from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.runtime.discovery.pod_identity import PodIdentity, id_of_name, siphash13

POD = {"POD_NAME": "worker-0", "POD_UID": "u-1", "POD_NAMESPACE": "prod"}


def test_instance_id_equals_that_of_released_dynamo() -> None:
    assert id_of_name("w-0") == 0x1D241219831293  # Observed with the released mocker.


def test_siphash_depends_on_every_input_length() -> None:
    values = {siphash13(b"x" * length) for length in range(20)}
    assert len(values) == 20
    assert max(values) < 1 << 64


def test_pod_mode_is_the_default_and_names_the_record_as_the_pod(tmp_path: Path) -> None:
    identity = PodIdentity.read(POD, tmp_path)
    assert (identity.record, identity.namespace, identity.is_container) == ("worker-0", "prod", False)
    assert identity.instance_id == id_of_name("worker-0")


@pytest.mark.parametrize(("container", "record"), [("main", "worker-0"), ("engine-1", "worker-0-engine-1")])
def test_container_mode_names_the_record_as_the_container_except_main(
    container: str, record: str, tmp_path: Path
) -> None:
    variables = {**POD, "DYN_KUBE_DISCOVERY_MODE": "container", "CONTAINER_NAME": container}
    identity = PodIdentity.read(variables, tmp_path)
    assert (identity.record, identity.is_container) == (record, True)


def test_files_of_the_downward_api_precede_the_environment(tmp_path: Path) -> None:
    (tmp_path / "pod_name").write_text("restored\n")
    (tmp_path / "pod_uid").write_text("u-2\n")
    identity = PodIdentity.read({**POD, "POD_NAMESPACE": ""}, tmp_path)
    assert (identity.pod, identity.uid, identity.namespace) == ("restored", "u-2", "default")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"POD_NAME": ""}, "POD_NAME: required by --discovery-backend kubernetes"),
        ({"POD_UID": ""}, "POD_UID: required"),
        ({"DYN_KUBE_DISCOVERY_MODE": "node"}, "DYN_KUBE_DISCOVERY_MODE='node': must be pod or container"),
        ({"DYN_KUBE_DISCOVERY_MODE": "container"}, "CONTAINER_NAME: required by"),
    ],
)
def test_missing_or_unknown_value_names_its_variable(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        PodIdentity.read({**POD, **variables}, tmp_path)
