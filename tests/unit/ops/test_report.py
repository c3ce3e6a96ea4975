"""Reports: verdict, exit status, table and JSON."""

import json

from dynamo.ops.report import CheckStatus, as_json, as_table, exit_status, failed, passed, skipped, verdict, warned

ROWS = [passed("a", "fine"), skipped("b", "absent"), warned("c", "odd", "look"), failed("longer", "bad", "repair")]


def test_verdict_is_the_most_severe_status_and_only_failures_change_the_exit_status() -> None:
    assert [verdict(ROWS[:count]) for count in (0, 2, 3, 4)] == [
        CheckStatus.PASS,
        CheckStatus.PASS,
        CheckStatus.WARN,
        CheckStatus.FAIL,
    ]
    assert [exit_status(ROWS[:count]) for count in (2, 3, 4)] == [0, 0, 1]


def test_table_has_columns_remedies_and_a_summary() -> None:
    assert as_table(ROWS).splitlines() == [
        "PASS  a       fine",
        "SKIP  b       absent",
        "WARN  c       odd",
        "              -> look",
        "FAIL  longer  bad",
        "              -> repair",
        "",
        "FAIL: 1 FAIL, 1 WARN, 1 SKIP, 1 PASS",
    ]


def test_long_evidence_is_wrapped_below_its_column_with_and_without_colours() -> None:
    row = warned("check", "word " * 30, "")
    plain = as_table([row], width=60).splitlines()
    colored = as_table([row], width=60, is_colored=True).splitlines()
    assert len(plain) == len(colored)
    assert len(plain) > 3
    assert plain[1].startswith(" " * 13 + "word")
    assert max(map(len, plain)) <= 60
    assert "\x1b[33mWARN\x1b[0m" in colored[0]


def test_json_has_version_verdict_and_rows() -> None:
    value = json.loads(as_json(ROWS))
    assert value["verdict"] == "FAIL"
    assert value["rows"][2] == {"check": "c", "status": "WARN", "evidence": "odd", "remedy": "look"}
