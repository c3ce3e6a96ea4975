"""Every file of upstream's tests that passes fewer tests here has a reason, and every reason a file."""

from tools import upstream_page


def test_every_file_that_passes_fewer_tests_has_a_reason() -> None:
    assert len(upstream_page.read()) > 100
    assert upstream_page.unexplained() == []


def test_every_reason_applies_to_a_file() -> None:
    assert upstream_page.unused_patterns() == []
