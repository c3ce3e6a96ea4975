"""Upstream's module of bindings, by its address."""

import pytest

import dynamo.llm
import dynamo.runtime
from dynamo import _core
from dynamo.llm.exceptions import WorkerUnavailable
from dynamo.parsers.registry import TOOL_CALLS


def test_core_module_exports_runtime_and_llm_names() -> None:
    assert _core.DistributedRuntime is dynamo.runtime.DistributedRuntime
    assert _core.ModelType is dynamo.llm.ModelType
    assert _core.WorkerUnavailable is WorkerUnavailable
    assert {*dynamo.runtime.__all__, *dynamo.llm.__all__} <= {*dir(_core)}


def test_every_listed_core_name_is_importable() -> None:
    assert not [name for name in dir(_core) if not hasattr(_core, name)]


def test_core_version_equals_the_package_version() -> None:
    assert _core.__version__ == dynamo.__version__


def test_core_lists_the_parser_names() -> None:
    assert set(_core.get_tool_parser_names()) == set(TOOL_CALLS)
    assert "qwen3" in _core.get_reasoning_parser_names()


def test_missing_core_name_raises_attribute_error() -> None:
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
