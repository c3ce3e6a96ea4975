"""Sums of samples."""

from dynamo.ops.troubleshoot.exposition import total

TEXT = """\
# HELP a_total Help
# TYPE a_total counter
a_total{x="1",y="2"} 3
a_total{x="2"} 4 1700000000
a_total_more 100
plain 5
broken{x="1"} word
"""


def test_samples_of_a_family_are_added() -> None:
    assert total(TEXT, "a_total") == 7
    assert total(TEXT, "a_total", {"x": "1"}) == 3
    assert total(TEXT, "a_total", {"x": "9"}) == 0
    assert total(TEXT, "plain") == 5


def test_absent_family_and_malformed_samples_have_no_sum() -> None:
    assert total(TEXT, "absent") is None
    assert total(TEXT, "broken") is None
