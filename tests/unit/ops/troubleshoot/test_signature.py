"""Matching: order, selection of lines, excerpts."""

import re

from dynamo.ops.report import CheckStatus
from dynamo.ops.troubleshoot.case import CaseFacts
from dynamo.ops.troubleshoot.signature import (
    LINE_CHARS_MAX,
    SEARCHED_CHARS,
    EvidenceLine,
    Signature,
    excerpt,
    matches,
    shown,
)


def signature(
    name: str, pattern: str, *, status: CheckStatus = CheckStatus.FAIL, is_symptom: bool = False
) -> Signature:
    return Signature(
        name=name, cause="Cause", command="command", pattern=re.compile(pattern), status=status, is_symptom=is_symptom
    )


def test_causes_precede_warnings_and_symptoms() -> None:
    case = CaseFacts(logs={"a.log": "x"})
    found = matches(
        case,
        [
            signature("symptom", "x", is_symptom=True),
            signature("warning", "x", status=CheckStatus.WARN),
            signature("cause", "x"),
            signature("absent", "y"),
        ],
    )
    assert [one.signature.name for one in found] == ["cause", "warning", "symptom"]


def test_row_has_first_lines_of_each_source_and_their_number() -> None:
    case = CaseFacts(
        logs={"a.log": "x 1\nx 2\nx 3", "b.log": "x 4"},
        objects={"Event": ({"reason": "R", "message": "x 5", "involvedObject": {"kind": "Pod", "name": "p"}},)},
    )
    (found,) = matches(case, [signature("s", "x")])
    assert found.row.evidence == "a.log: x 1; b.log: x 4; event of Pod p: R: x 5 (and 2 more)"
    assert found.row.remedy == "Cause. Next: command"


def test_repeated_lines_count_once() -> None:
    (found,) = matches(CaseFacts(logs={"a.log": "x\nx\n"}), [signature("s", "x")])
    assert (found.count, found.lines) == (1, (EvidenceLine("a.log", "x"),))


def test_lines_of_one_source_are_shown_if_there_is_no_other() -> None:
    lines = [EvidenceLine("a", str(number)) for number in range(5)]
    assert shown(lines) == tuple(lines[:3])


def test_long_line_is_shortened_around_the_match() -> None:
    line = "a" * 1000 + "MATCH" + "b" * 1000
    text = excerpt(line, 1000)
    assert "MATCH" in text
    assert len(text) <= LINE_CHARS_MAX + 2
    assert (text[0], text[-1]) == ("…", "…")
    assert excerpt("  short  ", 3) == "short"


def test_only_the_beginning_of_a_very_long_line_is_searched() -> None:
    case = CaseFacts(logs={"a.log": "a" * SEARCHED_CHARS + "MATCH", "b.log": "MATCH" + "a" * SEARCHED_CHARS})
    (found,) = matches(case, [signature("s", "MATCH")])
    assert [line.source for line in found.lines] == ["b.log"]
