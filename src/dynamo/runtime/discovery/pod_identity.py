"""Identity of a process in a Kubernetes pod: its discovery record and the instance id that is derived from its name.

Files of the downward API in `/etc/podinfo` precede the environment, because a restored checkpoint has the environment
of the pod in which it was taken.
"""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from dynamo.core.errors import ConfigError

PODINFO = Path("/etc/podinfo")
MODE_VARIABLE = "DYN_KUBE_DISCOVERY_MODE"
CONTAINER_VARIABLE = "CONTAINER_NAME"
MODES = ("pod", "container")
MAIN_CONTAINER = "main"
"""The container whose record has the pod's name in container mode too."""
DEFAULT_NAMESPACE = "default"
ID_MASK = (1 << 53) - 1
"""Instance ids are exact as IEEE 754 doubles, which some JSON readers use."""
WORD = (1 << 64) - 1


class PodIdentity(Struct, frozen=True, kw_only=True):
    """Names of the pod and of this process's discovery record."""

    pod: str
    uid: str
    namespace: str
    record: str
    """Name of the DynamoWorkerMetadata."""
    is_container: bool = False
    """Whether records are those of containers, whose readiness is that of the container."""

    @property
    def instance_id(self) -> int:
        """Return the instance id of every endpoint of this process."""
        return id_of_name(self.record)

    @classmethod
    def read(cls, variables: Mapping[str, str], folder: Path = PODINFO) -> "PodIdentity":
        """Return the identity of this process. Raise `ConfigError` if a name is missing or the mode is unknown."""

        def value(name: str) -> str:
            try:
                text = (folder / name.lower()).read_text().strip()
            except OSError:
                text = ""
            return text or variables.get(name, "")

        pod, uid, namespace = value("POD_NAME"), value("POD_UID"), value("POD_NAMESPACE")
        for name, text in (("POD_NAME", pod), ("POD_UID", uid)):
            if not text:
                raise ConfigError(
                    f"{name}: required by --discovery-backend kubernetes; the operator sets it in each pod"
                )
        mode = variables.get(MODE_VARIABLE) or MODES[0]
        if mode not in MODES:
            raise ConfigError(f"{MODE_VARIABLE}={mode!r}: must be pod or container")
        container = variables.get(CONTAINER_VARIABLE, "")
        if mode == "container" and not container:
            raise ConfigError(f"{CONTAINER_VARIABLE}: required by {MODE_VARIABLE}=container")
        record = record_name(pod, container) if mode == "container" else pod
        return cls(
            pod=pod,
            uid=uid,
            namespace=namespace or DEFAULT_NAMESPACE,
            record=record,
            is_container=mode == "container",
        )


def record_name(pod: str, container: str) -> str:
    """Return the name of a container's discovery record."""
    return pod if container == MAIN_CONTAINER else f"{pod}-{container}"


def id_of_name(name: str) -> int:
    """Return the instance id of a record's name: 53 bits of SipHash-1-3 with a zero key, as upstream hashes a string."""
    return siphash13(name.encode() + b"\xff") & ID_MASK


def siphash13(data: bytes) -> int:
    """Return SipHash-1-3 of bytes under the zero key (Aumasson and Bernstein, 2012)."""
    v0, v1, v2, v3 = 0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573

    def mix() -> None:
        nonlocal v0, v1, v2, v3
        v0 = (v0 + v1) & WORD
        v1 = _rotated(v1, 13) ^ v0
        v0 = _rotated(v0, 32)
        v2 = (v2 + v3) & WORD
        v3 = _rotated(v3, 16) ^ v2
        v0 = (v0 + v3) & WORD
        v3 = _rotated(v3, 21) ^ v0
        v2 = (v2 + v1) & WORD
        v1 = _rotated(v1, 17) ^ v2
        v2 = _rotated(v2, 32)

    whole = len(data) - len(data) % 8
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, whole, 8)]
    words.append((len(data) & 0xFF) << 56 | int.from_bytes(data[whole:], "little"))
    for word in words:
        v3 ^= word
        mix()
        v0 ^= word
    v2 ^= 0xFF
    for _ in range(3):
        mix()
    return v0 ^ v1 ^ v2 ^ v3


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & WORD
