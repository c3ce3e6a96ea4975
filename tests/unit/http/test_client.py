"""ChatClient: URLs, error bodies and server-sent events, read without a server."""

import json

import pytest

from dynamo.core.errors import ConfigError, Disconnected, HttpError, ResponseTimeout
from dynamo.http.client import ChatClient, Delta, error_message


class Wire:
    """Connection that responds to each request with the given bytes, and records the requests."""

    def __init__(self, answer: bytes, error: Exception | None = None) -> None:
        self.sent = b""
        self.is_closed = False
        self._answer = self._unread = answer
        self._error = error

    def settimeout(self, seconds: float | None) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self._unread = self._answer

    def recv(self, size: int) -> bytes:
        if self._error is not None:
            raise self._error
        data, self._unread = self._unread[:size], self._unread[size:]
        return data

    def close(self) -> None:
        self.is_closed = True


def client_of(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> ChatClient:
    client = ChatClient("http://localhost:1/base/")
    monkeypatch.setattr(client._http, "_connect", lambda limit_s: wire)
    return client


def answer(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode()


def event(**delta: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"


def test_client_yields_deltas_as_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        event(role="assistant")
        + ": ping\n\n"
        + event(reasoning_content="hm")
        + event(content="Hé")
        + "data: [DONE]\n\n"
    )
    wire = Wire(answer(body))
    deltas = list(client_of(wire, monkeypatch).chat("m", [{"role": "user", "content": "hi"}], {"max_tokens": 3}))
    assert deltas == [Delta(), Delta(reasoning="hm"), Delta("Hé")]
    assert wire.sent.startswith(b"POST /base/v1/chat/completions ")
    assert json.loads(wire.sent.partition(b"\r\n\r\n")[2]) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": 3,
    }
    assert wire.is_closed


def test_client_response_without_its_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Disconnected, match="ended early"):
        list(client_of(Wire(answer(event(content="a"))), monkeypatch).chat("m", []))


def test_client_raises_a_stream_error_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    body = event(content="a") + 'data: {"error": {"message": "worker gone"}}\n\n'
    with pytest.raises(HttpError, match="worker gone"):
        list(client_of(Wire(answer(body)), monkeypatch).chat("m", []))


def test_client_raises_a_refusal_with_status_and_message(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(answer('{"error": {"message": "no such model"}}', "404 Not Found"))
    with pytest.raises(HttpError, match="no such model") as caught:
        list(client_of(wire, monkeypatch).chat("m", []))
    assert caught.value.code == 404


@pytest.mark.parametrize(
    ("error", "raised"), [(TimeoutError(), ResponseTimeout), (ConnectionResetError("reset"), Disconnected)]
)
def test_client_connection_failure_raises_a_typed_error(
    error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(b"", error)
    with pytest.raises(raised):
        list(client_of(wire, monkeypatch).chat("m", []))
    assert wire.is_closed


def test_client_lists_model_names(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(answer('{"data": [{"id": "a"}, {"id": "b"}]}'))
    assert client_of(wire, monkeypatch).models() == ["a", "b"]
    assert wire.sent.startswith(b"GET /base/v1/models ")


def test_client_health_counts_generating_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    instances = [{"endpoint": "generate"}, {"endpoint": "worker_kv_query"}, {"endpoint": "generate"}]
    client = client_of(Wire(answer(json.dumps({"instances": instances}))), monkeypatch)
    monkeypatch.setattr(client, "models", lambda: ["a"])
    assert (client.health().models, client.health().generate_instances) == (("a",), 2)


def test_client_error_names_the_path_of_a_response_that_is_not_json(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Disconnected, match="/v1/models"):
        client_of(Wire(answer("<html>")), monkeypatch).models()


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("localhost:8000/", "http://localhost:8000"),
        ("https://box/v/", "https://box/v"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_client_url_may_omit_its_scheme_and_trailing_slash(url: str, read: str) -> None:
    assert ChatClient(url).url == read


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:99999", "http://x:y"])
def test_client_url_error_contains_an_example(url: str) -> None:
    with pytest.raises(ConfigError, match="expected something like"):
        ChatClient(url)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "nested"}, "message": "flat"}', "nested"),
        ('{"message": "flat", "code": 404}', "flat"),
        ('{"error": "a word"}', "a word"),
        ("not json", "not json"),
        ("", "no reason given"),
        ("[1]", "[1]"),
    ],
)
def test_client_error_message_is_read_from_every_body_format(body: str, message: str) -> None:
    assert error_message(body) == message
