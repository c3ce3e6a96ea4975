"""Results of upstream's tests are counted from pytest's report."""

from pathlib import Path
from xml.etree import ElementTree as ET

from tools.upstream_tests import Result, counted, files

REPORT = """<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><skipped message="no GPU"/></testcase>
<testcase name="c"><failure message="assert 1 == 2">def c():
E       assert 1 == 2</failure></testcase>
<testcase name="d"><error message="collection failure">x.py:1: in d
E   ImportError: cannot import name 'x'</error></testcase>
</testsuite></testsuites>"""


def test_each_outcome_is_counted_and_failures_keep_their_cause() -> None:
    result = counted(ET.fromstring(REPORT))
    reasons = {"c": "assert 1 == 2", "d": "ImportError: cannot import name 'x'"}
    assert result == Result(passed=1, failed=1, errors=1, skipped=1, reasons=reasons)
    assert str(result) == "1/1/1/1"


def test_files_are_tests_below_a_directory_or_one_file(tmp_path: Path) -> None:
    for name in ("b/test_one.py", "test_two.py", "conftest.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [file.name for file in files(tmp_path, "*")] == ["test_one.py", "test_two.py"]
    assert [file.name for file in files(tmp_path, "test_o*")] == ["test_one.py"]
    assert list(files(tmp_path / "test_two.py", "*")) == [tmp_path / "test_two.py"]
