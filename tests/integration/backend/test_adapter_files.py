"""Adapter files fetched from an object store over HTTP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.object_server import ObjectServer

from dynamo.backend.adapter_files import FILES, AdapterFiles, fetch_from_s3
from dynamo.core.errors import InvalidArgument


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DYN_LORA_ENABLED", "true")
    with ObjectServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "lent")
        yield server


def test_adapter_is_downloaded_from_an_object_store(s3: ObjectServer, tmp_path: Path) -> None:
    for name in FILES:
        s3.objects[f"/bucket/some/where/{name}"] = name.encode() * 100_000
    fetch_from_s3("bucket/some/where/", str(tmp_path))
    assert all((tmp_path / name).read_bytes() == name.encode() * 100_000 for name in FILES)
    assert {headers["x-amz-security-token"] for headers in s3.headers} == {"lent"}
    assert all("x-amz-security-token" in headers["authorization"] for headers in s3.headers)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            lambda server: server.objects.pop("/bucket/a/adapter_model.safetensors"),
            "adapter_model.safetensors does not exist",
        ),
        (lambda server: setattr(server, "cut", 5), "body error"),
        (lambda server: setattr(server, "status", 403), "403 Forbidden"),
    ],
)
def test_failing_object_store_is_named_in_the_error(
    s3: ObjectServer, tmp_path: Path, prepare: Callable[[ObjectServer], Any], message: str
) -> None:
    for name in FILES:
        s3.objects[f"/bucket/a/{name}"] = b"something"
    prepare(s3)
    with pytest.raises(InvalidArgument, match=message):
        AdapterFiles(str(tmp_path / "cache")).hold("s3://bucket/a")
    assert list((tmp_path / "cache").iterdir()) == []
