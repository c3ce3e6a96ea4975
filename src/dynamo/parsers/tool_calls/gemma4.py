"""Gemma 4: calls in a special notation: bare keys, and strings between marks that do not occur in text.

<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>
"""

import re
from collections.abc import Sequence

from dynamo.parsers.base import Tool, ToolCallFamily
from dynamo.parsers.tool_calls.calls import CallParser
from dynamo.parsers.tool_calls.reader import Reading, Write, ignore, landmarks
from dynamo.parsers.tool_calls.schemas import NAME
from dynamo.parsers.tool_calls.values import STRING_FOLLOWERS, StringText, Values, escaped, quoted, scalar_json

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = (OPEN, CLOSE, QUOTE)

_KEY = re.compile(r"[\w.\-]*")
_WORD = re.compile(r"[^,{}\[\]<\r\n]*")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null", "nil": "null"}
"""Words with a meaning, in any case, as in the released parser."""
_STRING_ENDS = landmarks(QUOTE, OPEN, CLOSE)
_CALL = landmarks("call:")


class GemmaValues(Values):
    """Values in Gemma's notation."""

    quotes = landmarks(QUOTE)

    def string(self, quote: str, write: Write) -> Reading[bool]:
        """See `Values.string`."""
        text = StringText(lambda piece: write(escaped(piece)))
        ends = _STRING_ENDS
        while (end := (yield from self.reader.until(ends, text.put))) in (OPEN, CLOSE):
            self.reader.back(end)
            if not (yield from self._is_closed(quote)):
                return False
            ends = landmarks(QUOTE)
        text.flush()
        return bool(end)

    def _is_closed(self, quote: str) -> Reading[bool]:
        """See `Values._is_closed`."""
        tape: list[str] = []
        tape.append((yield from self.reader.until(landmarks(quote), tape.append)))
        closed = bool(tape[-1])
        if closed:
            tape.append((yield from self.reader.space()))
            closed = (yield from self.reader.peek()) in STRING_FOLLOWERS
        self.reader.restore("".join(tape))
        return closed

    def key(self) -> Reading[str]:
        """See `Values.key`. Quoted keys are accepted too."""
        word = yield from self.reader.word(_KEY)
        if word:
            return quoted(word) if (yield from self.reader.peek()) else ""
        return (yield from super().key())

    def scalar(self) -> Reading[str]:
        """See `Values.scalar`. Anything but a number or a word of JSON is a string without quotes."""
        word = (yield from self.reader.word(_WORD)).strip()
        char = yield from self.reader.peek()
        if not char or (not word and char not in ",}]"):
            return ""
        return _WORDS.get(word.lower()) or scalar_json(word) or quoted(word)


class GemmaCallParser(CallParser):
    """Parser of one choice."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools, MARKERS)
        self.values = GemmaValues(self.reader)

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`."""
        if mark != OPEN:
            return
        yield from self.reader.space()
        if (yield from self.reader.at_any(_CALL)):
            self.reader.skip(len("call:"))
            name = yield from self.reader.word(NAME)
            yield from self.reader.space()
            if name and (yield from self.reader.peek()) == "{":
                self.begin(name)
                yield from self.values.value(self.argue)
        while (mark := (yield from self.reader.until(self.marks, ignore))) == QUOTE:
            pass
        if mark == OPEN:
            self.reader.back(mark)
        self.cut()
        yield from self.separate()


FAMILIES = (
    ToolCallFamily(
        name="gemma4",
        make=GemmaCallParser,
        markers=MARKERS,
        example='<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
        aliases=("gemma-4",),
    ),
)
