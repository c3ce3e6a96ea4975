"""Conversation: history, commands, and answers that fail or are interrupted."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from dynamo.core.errors import Disconnected, DynamoException, HttpError
from dynamo.http.client import ChatClient, Delta
from dynamo.http.terminal_chat import Conversation, choose_model, prompted


class Echo(ChatClient):
    """A server that answers with the number of messages and the last one; it fails or is interrupted on demand."""

    def __init__(self) -> None:
        super().__init__("localhost:1")
        self.received_requests: list[tuple[str, list[Mapping[str, str]], Mapping[str, Any]]] = []

    def models(self) -> list[str]:
        return ["echo", "other"]

    def chat(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any] | None = None
    ) -> Iterator[Delta]:
        self.received_requests.append((model, list(messages), options or {}))
        text = messages[-1]["content"]
        yield Delta(reasoning="hm ")
        yield Delta(f"{len(messages)}:")
        if text == "fail":
            raise Disconnected("gone")
        if text == "interrupt":
            raise KeyboardInterrupt
        yield Delta(text)


def converse(*lines: str, model: str | None = "echo", **settings: Any) -> tuple[Echo, Conversation, str, int]:
    server, out = Echo(), io.StringIO()
    conversation = Conversation(server, model, **settings)
    status = conversation.run(iter(lines), out)
    return server, conversation, out.getvalue(), status


def test_chat_streams_responses_and_sends_the_history_with_each_message() -> None:
    server, conversation, text, status = converse("hi\n", "\n", "you\n")
    assert text == "hm 1:hi\nhm 3:you\n"
    assert status == 0
    assert [message["role"] for message in server.received_requests[1][1]] == ["user", "assistant", "user"]
    assert conversation.messages[1] == {"role": "assistant", "content": "1:hi"}


def test_reset_removes_all_messages_except_the_system_prompt() -> None:
    _, conversation, _, _ = converse("hi", "/reset", system="Be brief.")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_system_prompt_can_be_set_and_removed() -> None:
    server, conversation, _, _ = converse("/system Be kind.", "hi", "/system")
    assert server.received_requests[0][1][0] == {"role": "system", "content": "Be kind."}
    assert conversation.messages == []


def test_model_command_selects_a_served_model() -> None:
    server, _, text, _ = converse("/model", "/model none", "/model other", "hi")
    assert "* echo\n  other" in text
    assert "--model 'none': not served" in text
    assert server.received_requests[0][0] == "other"


def test_exit_command_ends_the_chat_and_unknown_commands_are_not_sent() -> None:
    server, _, text, status = converse("/hepl", "/exit", "hi")
    assert "unknown command /hepl" in text
    assert (server.received_requests, status) == ([], 0)


def test_failed_response_is_removed_from_the_history() -> None:
    server, _, text, status = converse("fail", "hi")
    assert "error: gone" in text
    assert server.received_requests[1][1] == [{"role": "user", "content": "hi"}]
    assert status == 0


def test_chat_that_ends_with_a_failure_has_a_nonzero_exit_status() -> None:
    assert converse("hi", "fail")[3] == 1


def test_worker_that_requires_a_limit_of_output_tokens_gets_one_that_the_user_did_not_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Limited(Echo):
        def chat(
            self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any] | None = None
        ) -> Iterator[Delta]:
            if "max_tokens" not in (options or {}):
                raise HttpError(400, "`max_output_tokens` (or `max_tokens`) is required by the mocker worker")
            yield from super().chat(model, messages, options)

    server, out = Limited(), io.StringIO()
    assert Conversation(server, "echo").run(iter(["hi", "you"]), out) == 0
    assert out.getvalue() == "hm 1:hi\nhm 3:you\n"
    assert [options["max_tokens"] for _, _, options in server.received_requests] == [256, 256]
    assert capsys.readouterr().err.count("--max-tokens sets another one") == 1


def test_interrupted_response_stays_in_the_history_as_received() -> None:
    _, conversation, text, _ = converse("interrupt")
    assert "[interrupted]" in text
    assert conversation.messages[-1] == {"role": "assistant", "content": "1:"}


def test_options_are_sent_with_every_message() -> None:
    assert converse("hi")[0].received_requests[0][2] == {}
    assert converse("hi", options={"max_tokens": 3, "temperature": 0.0})[0].received_requests[0][2] == {
        "max_tokens": 3,
        "temperature": 0.0,
    }


def test_chat_without_a_model_uses_the_first_served_model_for_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    server, conversation, text, _ = converse("hi", "/model", model=None)
    assert server.received_requests[0][0] == "echo"
    assert "  echo\n  other" in text
    monkeypatch.setattr(server, "models", list)
    out = io.StringIO()
    assert conversation.run(iter(["hi"]), out) == 1
    assert "error: no model is served yet" in out.getvalue()
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_default_model_is_the_first_served_one() -> None:
    assert choose_model(["a", "b"], None) == "a"
    assert choose_model(["a", "b"], "b") == "b"
    with pytest.raises(DynamoException, match="no model is served yet"):
        choose_model([], None)


def test_interrupt_discards_the_prompt_line_and_end_of_input_ends_the_prompt() -> None:
    typed: list[str | BaseException] = ["a", KeyboardInterrupt(), "b", EOFError()]

    def read() -> str:
        item = typed.pop(0)
        if isinstance(item, str):
            return item
        raise item

    assert list(prompted(read)) == ["a", "b"]
