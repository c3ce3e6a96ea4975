"""Requirements of the distribution against the installed packages."""

import pytest

from dynamo.ops.doctor import packages
from dynamo.ops.doctor.packages import distributions, package_facts

LINES = [
    "msgspec>=0.19",
    "absent>=2; python_version >= '3.0'",
    "elsewhere; sys_platform == 'none'",
    "old<2; extra == 'nats'",
    "dynamo-serve[grpc]; extra == 'test'",
]


def test_requirements_are_those_of_the_extra_and_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed_version", {"msgspec": "0.20", "old": "2.1"}.get)
    assert [(one.name, one.installed, one.is_accepted) for one in distributions(LINES, "")] == [
        ("msgspec", "0.20", True),
        ("absent", None, True),
    ]
    (one,) = distributions(LINES, "nats")
    assert (one.requirement, one.is_accepted) == ("old<2", False)
    assert distributions(LINES, "test") == ()


def test_facts_of_this_process_name_the_interpreter_and_a_command_for_each_extra() -> None:
    facts = package_facts()
    assert facts.python >= (3, 11)
    assert "pip install" in facts.install[""]
    assert facts.install.keys() >= facts.extras.keys()
