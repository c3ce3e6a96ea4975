"""Conversation: history, commands, and answers that fail or are interrupted."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from dynamo.core.errors import Disconnected, DynamoException
from dynamo.http.client import ChatClient, Delta
from dynamo.http.terminal_chat import Conversation, choose_model, prompted


class Echo(ChatClient):
    """A server that answers with the number of messages and the last one; it fails or is interrupted on demand."""

    def __init__(self) -> None:
        super().__init__("localhost:1")
        self.asked: list[tuple[str, list[Mapping[str, str]], Mapping[str, Any]]] = []

    def models(self) -> list[str]:
        return ["echo", "other"]

    def chat(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any] | None = None
    ) -> Iterator[Delta]:
        self.asked.append((model, list(messages), options or {}))
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


def test_answers_stream_out_and_the_history_goes_with_every_question() -> None:
    server, conversation, text, status = converse("hi\n", "\n", "you\n")
    assert text == "hm 1:hi\nhm 3:you\n"
    assert status == 0
    assert [message["role"] for message in server.asked[1][1]] == ["user", "assistant", "user"]
    assert conversation.messages[1] == {"role": "assistant", "content": "1:hi"}


def test_reset_forgets_all_but_the_system_prompt() -> None:
    _, conversation, _, _ = converse("hi", "/reset", system="Be brief.")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_a_system_prompt_can_be_set_and_dropped() -> None:
    server, conversation, _, _ = converse("/system Be kind.", "hi", "/system")
    assert server.asked[0][1][0] == {"role": "system", "content": "Be kind."}
    assert conversation.messages == []


def test_another_model_can_be_chosen_among_those_served() -> None:
    server, _, text, _ = converse("/model", "/model none", "/model other", "hi")
    assert "* echo\n  other" in text
    assert "--model 'none': not served" in text
    assert server.asked[0][0] == "other"


def test_exit_ends_and_an_unknown_command_is_never_sent() -> None:
    server, _, text, status = converse("/hepl", "/exit", "hi")
    assert "unknown command /hepl" in text
    assert (server.asked, status) == ([], 0)


def test_a_failed_answer_leaves_a_well_formed_history() -> None:
    server, _, text, status = converse("fail", "hi")
    assert "error: gone" in text
    assert server.asked[1][1] == [{"role": "user", "content": "hi"}]
    assert status == 0


def test_a_conversation_that_ends_in_a_failure_says_so_in_its_status() -> None:
    assert converse("hi", "fail")[3] == 1


def test_an_interrupted_answer_stays_in_the_history_as_far_as_it_came() -> None:
    _, conversation, text, _ = converse("interrupt")
    assert "[interrupted]" in text
    assert conversation.messages[-1] == {"role": "assistant", "content": "1:"}


def test_options_are_sent_with_every_message() -> None:
    assert converse("hi")[0].asked[0][2] == {}
    assert converse("hi", options={"max_tokens": 3, "temperature": 0.0})[0].asked[0][2] == {
        "max_tokens": 3,
        "temperature": 0.0,
    }


def test_without_a_model_each_message_goes_to_the_first_one_served(monkeypatch: pytest.MonkeyPatch) -> None:
    server, conversation, text, _ = converse("hi", "/model", model=None)
    assert server.asked[0][0] == "echo"
    assert "  echo\n  other" in text
    monkeypatch.setattr(server, "models", list)
    out = io.StringIO()
    assert conversation.run(iter(["hi"]), out) == 1
    assert "error: no model is served yet" in out.getvalue()
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_the_first_model_served_is_the_one_talked_to() -> None:
    assert choose_model(["a", "b"], None) == "a"
    assert choose_model(["a", "b"], "b") == "b"
    with pytest.raises(DynamoException, match="no model is served yet"):
        choose_model([], None)


def test_at_a_prompt_an_interrupt_drops_the_line_and_the_end_of_input_ends() -> None:
    typed: list[str | BaseException] = ["a", KeyboardInterrupt(), "b", EOFError()]

    def read() -> str:
        item = typed.pop(0)
        if isinstance(item, str):
            return item
        raise item

    assert list(prompted(read)) == ["a", "b"]
