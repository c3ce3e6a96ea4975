"""Received data is parsed completely and in order, in turns with other connections, and only while its parser is ready."""

import asyncio

import pytest
from tests.settle import turns

from dynamo.http.server.paced_input import TURN_S, InputTurns, PacedInput


class Clock:
    """Time that passes by `step_s` with each reading."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class Parser:
    """A parser that takes two bytes at a time, up to a limit."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.data = b""
        self.most = 1000
        self.is_held = False

    def feed(self, data: bytes) -> None:
        self.data += data
        self.log.append(self.name)

    def slice_bytes(self) -> int:
        return 2

    def is_ready(self) -> bool:
        return len(self.data) < self.most

    def hold_reading(self) -> None:
        self.is_held = True

    def release_reading(self) -> None:
        self.is_held = False


@pytest.fixture
def log() -> list[str]:
    return []


async def test_data_within_the_time_is_parsed_at_once(log: list[str]) -> None:
    parser = Parser("a", log)
    paced = PacedInput(parser, InputTurns(Clock(0.0)))
    paced.add(b"0123456789")
    assert (parser.data, parser.is_held, paced.is_empty) == (b"0123456789", False, True)


async def test_connections_take_turns_and_lose_nothing(log: list[str]) -> None:
    shared = InputTurns(Clock(TURN_S * 2))
    parsers = [Parser(name, log) for name in "ab"]
    first, second = (PacedInput(parser, shared) for parser in parsers)
    first.add(b"012345")
    second.add(b"0123")
    assert log == ["a"] and [parser.is_held for parser in parsers] == [True, True]
    first.add(b"6")
    await turns(8)
    assert log == ["a", "a", "b", "a", "b", "a"]
    assert [parser.data for parser in parsers] == [b"0123456", b"0123"]
    assert not any(parser.is_held for parser in parsers) and not shared.is_busy


async def test_parser_that_is_not_ready_gets_the_rest_after_it_resumes(log: list[str]) -> None:
    parser = Parser("a", log)
    paced = PacedInput(parser, InputTurns(Clock(0.0)))
    parser.most = 4
    paced.add(b"01234567")
    await turns(3)
    assert (parser.data, parser.is_held) == (b"0123", True)
    parser.most = 1000
    paced.resume()
    assert parser.data == b"0123", "in an iteration of its own"
    await turns(2)
    assert (parser.data, parser.is_held) == (b"01234567", False)


async def test_closed_connection_in_the_queue_has_no_turn(log: list[str]) -> None:
    parser = Parser("a", log)
    shared = InputTurns(Clock(TURN_S * 2))
    paced = PacedInput(parser, shared)
    paced.add(b"0123")
    paced.close()
    await turns(3)
    assert parser.data == b"01" and not shared.is_busy


async def test_error_of_one_connection_does_not_stop_the_others(log: list[str]) -> None:
    shared, parser = InputTurns(Clock(TURN_S * 2)), Parser("a", log)

    def fail() -> None:
        raise ValueError("broken")

    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    shared.add(fail)
    PacedInput(parser, shared).add(b"01")
    await turns(4)
    assert parser.data == b"01" and [str(one) for one in errors] == ["broken"]


async def test_reads_of_many_connections_share_the_time_of_an_iteration(log: list[str]) -> None:
    shared = InputTurns(Clock(TURN_S * 0.3))
    parsers = [Parser(name, log) for name in "abcdef"]
    for parser in parsers:
        PacedInput(parser, shared).add(b"01")
    parsed = [len(log)]
    while len(log) < len(parsers):
        await turns(1)
        parsed.append(len(log))
    assert parsed[0] < len(parsers) and parsed[-1] - parsed[-2] < len(parsers)
    assert "".join(log) == "abcdef"
    assert not any(parser.is_held for parser in parsers)
    await turns(3)
    assert shared.has_time()
