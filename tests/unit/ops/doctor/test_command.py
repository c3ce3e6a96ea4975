"""The command line of `dynamo doctor`."""

import json

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.doctor.command import DoctorConfig, doctor, print_report
from dynamo.ops.report import failed


def test_invalid_options_are_one_error_line() -> None:
    with pytest.raises(ConfigError, match="--http-port 70000: must be from 0 to 65535"):
        DoctorConfig(http_port=70000)
    with pytest.raises(ConfigError, match="unknown argument --bundel; did you mean --bundle"):
        doctor(["--bundel", "x"])


def test_report_is_printed_as_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [failed("port 8000", "in use", "end that process")]
    print_report(rows, is_json=False)
    assert "FAIL  port 8000  in use" in capsys.readouterr().out
    print_report(rows, is_json=True)
    assert json.loads(capsys.readouterr().out)["verdict"] == "FAIL"
