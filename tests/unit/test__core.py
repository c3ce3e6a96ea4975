"""Upstream's module of bindings, by its address."""

import pytest

import dynamo.llm
import dynamo.runtime
from dynamo import _core
from dynamo.llm.exceptions import WorkerUnavailable
from dynamo.parsers.registry import TOOL_CALLS


def test_it_shows_what_the_packages_show() -> None:
    assert _core.DistributedRuntime is dynamo.runtime.DistributedRuntime
    assert _core.ModelType is dynamo.llm.ModelType
    assert _core.WorkerUnavailable is WorkerUnavailable
    assert {*dynamo.runtime.__all__, *dynamo.llm.__all__} <= {*dir(_core)}


def test_every_name_that_it_lists_can_be_had() -> None:
    assert not [name for name in dir(_core) if not hasattr(_core, name)]


def test_it_has_the_version_of_the_package() -> None:
    assert _core.__version__ == dynamo.__version__


def test_the_parsers_are_named() -> None:
    assert set(_core.get_tool_parser_names()) == set(TOOL_CALLS)
    assert "qwen3" in _core.get_reasoning_parser_names()


def test_a_name_that_is_missing_says_so() -> None:
    with pytest.raises(AttributeError, match="NoSuchName"):
        _core.NoSuchName  # noqa: B018


@pytest.mark.parametrize("name", ["run_kv_indexer", "run_select_service", "run_slot_tracker"])
def test_services_are_run_with_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = getattr(_core, name)
    with pytest.raises(SystemExit) as helped:
        run(["--help"])
    assert helped.value.code == 0
    assert "--port" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        run(["--port", "x"])
    assert refused.value.code == 2
    assert "--port" in capsys.readouterr().err
