"""Files of a bundle contain no secrets."""

import json

from dynamo.ops.doctor.bundle import discovery_file, log_files, machine_files
from dynamo.ops.report import failed

VARIABLES = {
    "DYN_API_KEYS": "secret-1",
    "NATS_SERVER": "nats://u:secret-2@h:4222",
    "HF_TOKEN": "secret-3",
    "DYN_LOG": "info",
    "MAIL": "private",
}


def test_machine_files_have_the_report_and_the_environment_without_secrets() -> None:
    row = failed("NATS", "nats://u:secret-2@h:4222: refused", "start it")
    files = machine_files([row], VARIABLES, {"a": "1"}, "Linux")
    assert set(files) == {"README.txt", "report.json", "report.txt", "environment.json", "packages.txt", "system.txt"}
    assert "secret-" not in "".join(files.values())
    assert json.loads(files["report.json"])["rows"][0]["evidence"] == "nats://[redacted]@h:4222: refused"
    assert json.loads(files["environment.json"]) == {
        "DYN_API_KEYS": "[redacted]",
        "DYN_LOG": "info",
        "HF_TOKEN": "[redacted]",
        "NATS_SERVER": "nats://[redacted]@h:4222",
    }


def test_records_and_logs_are_redacted() -> None:
    (one,) = json.loads(discovery_file([("v1/mdc/x", 5.0, '{"api_key": "secret-4", "name": "m"}')]))
    assert one == {"key": "v1/mdc/x", "modified": 5.0, "value": '{"api_key": "[redacted]", "name": "m"}'}
    assert log_files("run-1", {"../worker 1.log": "password=secret-5"}) == {
        "logs/run-1/worker_1.log": "password=[redacted]"
    }
