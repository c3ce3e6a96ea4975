"""Options of `dynamo chat`, and their effect on a request."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Any

import pytest

from dynamo.cli.chat import ChatConfig, chat
from dynamo.core.errors import ConfigError
from dynamo.http.client import ChatClient, Delta


@pytest.mark.parametrize("config", [{"max_tokens": 0}, {"temperature": 3.0}, {"temperature": -1.0}])
def test_invalid_chat_options_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        ChatConfig(**config)


def test_sampling_options_are_sent_only_when_given(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Mapping[str, Any] | None] = []

    def respond(
        client: ChatClient,
        model: str,
        messages: Sequence[Mapping[str, str]],
        options: Mapping[str, Any] | None = None,
    ) -> Iterator[Delta]:
        sent.append(options)
        yield Delta("ok")

    monkeypatch.setattr(ChatClient, "models", lambda client: ["echo"])
    monkeypatch.setattr(ChatClient, "chat", respond)
    for argv in ([], ["--max-tokens=3", "--temperature=0"]):
        monkeypatch.setattr(sys, "stdin", StringIO("hi\n"))
        assert chat(argv) == 0
    assert sent == [{}, {"max_tokens": 3, "temperature": 0.0}]
