"""Responses of an API server; requests are tested with the server of tests/integration/kubernetes."""

from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.k8s.client import KubeClient, KubeRefused, change_of, refusal


def test_refusal_has_the_reason_and_the_message_of_the_status() -> None:
    error = refusal(409, b'{"kind": "Status", "reason": "Conflict", "message": "the object has been modified"}')
    assert (error.code, error.reason, str(error)) == (409, "Conflict", "409 Conflict: the object has been modified")


def test_refusal_of_a_proxy_has_the_beginning_of_its_text() -> None:
    assert str(refusal(502, b"<html>" + b"x" * 1000)) == "502: <html>" + "x" * 194
    assert refusal(500, b"[]").code == 500


def test_change_has_its_type_object_and_revision() -> None:
    change = change_of(b'{"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "7"}}}')
    assert (change.type, change.object["metadata"]["name"], change.revision) == ("ADDED", "a", "7")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}', 410),
        (b"{", 500),
        (b'{"type": "ADDED"}', 500),
        (b'{"type": "ADDED", "object": {"metadata": {}}}', 500),
        (b"[]", 500),
    ],
)
def test_error_and_malformed_line_of_a_watch_are_refusals(line: bytes, code: int) -> None:
    with pytest.raises(KubeRefused) as caught:
        change_of(line)
    assert caught.value.code == code


@pytest.mark.parametrize("content", [None, "", "{", "clusters: []"])
def test_unusable_kubeconfig_is_one_line(content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(ConfigError, match=r"^KUBECONFIG ") as caught:
        KubeClient()
    assert "\n" not in str(caught.value)
