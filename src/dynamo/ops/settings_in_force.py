"""Settings in force: the registry and the planes of a process, from its environment and its command line. Pure."""

from collections.abc import Mapping, Sequence

REGISTRY_SETTINGS = ("DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS", "DYN_FILE_KV")
"""Settings that name the registry; they must be the same for all processes of a graph."""
PLANE_SETTINGS = ("DYN_EVENT_PLANE", "DYN_REQUEST_PLANE")
FLAGS = {
    "--discovery-backend": "DYN_DISCOVERY_BACKEND",
    "--event-plane": "DYN_EVENT_PLANE",
    "--request-plane": "DYN_REQUEST_PLANE",
    "--namespace": "DYN_NAMESPACE",
}
"""Flags that override a variable."""


def settings_in_force(variables: Mapping[str, str], words: Sequence[str]) -> dict[str, str]:
    """Return a process's variables, with those that a flag of its command line overrides."""
    found = dict(variables)
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in FLAGS and (equals or at + 1 < len(words)):
            found[FLAGS[flag]] = value if equals else words[at + 1]
    return found


def is_same(setting: str, one: str, other: str) -> bool:
    """Return whether two values of a setting mean the same: the order of addresses does not matter."""
    if setting in {"ETCD_ENDPOINTS", "NATS_SERVER"}:
        return _addresses(one) == _addresses(other)
    return one.rstrip("/") == other.rstrip("/") if setting == "DYN_FILE_KV" else one == other


def _addresses(text: str) -> set[str]:
    return {part.strip().rpartition("://")[2].rstrip("/") for part in text.split(",") if part.strip()}
