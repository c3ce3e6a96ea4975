"""Scripts: answers with predetermined tokens: recorded answers, and answers with reasoning marks."""

from collections import Counter
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.runtime.request_plane.base import Reply


class ScriptedReply:
    """A wrapper of a reply that replaces its tokens by those of a script."""

    def __init__(self, reply: Reply, script: dict[int, int]) -> None:
        self.reply = reply
        self.request_id = reply.request_id
        self._script = script
        self._position = 0

    @property
    def is_cancelled(self) -> bool:
        return self.reply.is_cancelled

    def on_cancel(self, callback: Any) -> None:
        self.reply.on_cancel(callback)

    def next(self, token_id: int) -> int:
        """Return the token that is emitted in place of the next one."""
        place, self._position = self._position, self._position + 1
        return self._script.get(place, token_id)

    def token(self, token_id: int) -> None:
        self.reply.token(self.next(token_id))

    def item(self, value: Any) -> None:
        value.token_ids = [self.next(token_id) for token_id in value.token_ids]
        self.reply.item(value)

    def finish(self) -> None:
        self.reply.finish()

    def fail(self, error: BaseException) -> None:
        self.reply.fail(error)


class _Row(msgspec.Struct):
    """The fields of a trace line that are replayed."""

    output_token_ids: list[int] | None = None
    output_length: int | None = None
    request_id: str | int | None = None
    session_id: str | int | None = None
    output_replay_id: str | int | None = None


def read_answers(path: str) -> dict[str, list[int]]:
    """Return the recorded answers of a Mooncake trace by the id of their lines.

    The id is `request_id`, else `SESSION:TURN` from the line's `session_id` and the number of earlier lines of that
    session. Lines without either are identified by `output_replay_id`, or numbered from 0. Raise `ConfigError` with the
    invalid line.
    """
    found: dict[str, list[int]] = {}
    turns: Counter[str] = Counter()
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file):
                if line.strip():
                    _add(found, turns, line, number)
    except OSError as error:
        raise ConfigError(f"--response-replay-trace-path {path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"--response-replay-trace-path {path}, line {number + 1}: {error}") from None
    return found


def _add(found: dict[str, list[int]], turns: Counter[str], line: bytes, number: int) -> None:
    row = msgspec.json.decode(line, type=_Row)
    name = _name_of(row, turns, number)
    tokens = row.output_token_ids
    if not tokens:
        return
    if row.output_length is not None and row.output_length != len(tokens):
        raise ValueError(f"output_length is {row.output_length}, but there are {len(tokens)} output_token_ids")
    if name in found:
        raise ValueError(f"duplicate id {name}")
    found[name] = tokens


def _name_of(row: _Row, turns: Counter[str], number: int) -> str:
    turn = None
    if row.session_id is not None:
        session = str(row.session_id)
        turn = f"{session}:{turns[session]}"
        turns[session] += 1
    return str(next(one for one in (row.request_id, turn, row.output_replay_id, number) if one is not None))


class ReasoningMarks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of `--reasoning`."""

    start_thinking_token_id: int
    end_thinking_token_id: int
    thinking_ratio: float
    """Share of the answer between the marks, from 0 to 1."""

    def marks(self, max_tokens: int) -> dict[int, int]:
        """Return the marker tokens of an answer by their position."""
        thoughts = int(max_tokens * self.thinking_ratio)
        if thoughts < 2:
            return {}
        return {0: self.start_thinking_token_id, thoughts - 1: self.end_thinking_token_id}


def read_reasoning(text: str) -> ReasoningMarks:
    """Parse the flag. Raise `ConfigError`."""
    try:
        found = msgspec.json.decode(text, type=ReasoningMarks)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--reasoning: {error}") from None
    if not 0 <= found.thinking_ratio <= 1:
        raise ConfigError(f"--reasoning: thinking_ratio is {found.thinking_ratio:g}: expected 0 to 1")
    if min(found.start_thinking_token_id, found.end_thinking_token_id) < 0:
        raise ConfigError("--reasoning: expected token ids of zero or more")
    return found
