"""Common behaviour of all call formats, tested with the smallest one."""

from tests.unit.parsers.reading import outcome

from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta
from dynamo.parsers.tool_calls.calls import CallParser, joined
from dynamo.parsers.tool_calls.reader import landmarks


class MinimalParser(CallParser):
    """`<call>name</call>`; a stray `(` is a stop."""

    def __init__(self):
        super().__init__([], ("<call>", "</call>"), ("(",))

    def marked(self, mark):
        if mark == "(":
            tape = [mark, (yield from self.reader.space())]
            self.unstop(tape)
        elif mark == "<call>":
            parts = []
            if (yield from self.reader.until(landmarks("</call>"), parts.append)):
                self.begin("".join(parts))
                self.argue("{")
                self.argue("}")
            yield from self.separate("!")


def found(text):
    whole, by_character = outcome(MinimalParser, text)
    assert whole == by_character
    return whole.content, [name for name, _ in whole.calls]


def test_white_space_between_calls_is_dropped():
    assert found("a <call>f</call>\n <call>g</call>\n") == ("a ", ["f", "g"])
    assert found("a <call>f</call>\n b") == ("a \n b", ["f"])


def test_stray_text_after_a_call_is_dropped():
    assert found("<call>f</call>! !<call>g</call>!b!") == ("b!", ["f", "g"])


def test_stray_marker_is_dropped():
    assert found("a </call>b") == ("a b", [])


def test_punctuation_without_a_call_is_content():
    assert found("a (  <call>f</call>") == ("a (  ", ["f"])


def test_plain_text_is_emitted_at_once():
    parser = MinimalParser()
    assert parser.feed("a") == [ContentDelta("a")]
    assert parser.feed("b <") == [ContentDelta("b ")]
    assert parser.feed("") == []
    assert parser.feed("d") == [ContentDelta("<d")]
    assert parser.finish() == []


def test_arguments_are_merged_within_one_fed_text():
    events = MinimalParser().feed("<call>f</call><call>g</call>")
    assert events == [CallBegin(0, "f"), CallArguments(0, "{}"), CallBegin(1, "g"), CallArguments(1, "{}")]
    assert joined([]) == []
