"""The public names: all of them exist, none of them is loaded before its first use."""

import subprocess
import sys

import pytest

import dynamo.llm
import dynamo.runtime


@pytest.mark.parametrize("module", [dynamo.llm, dynamo.runtime], ids=lambda module: module.__name__)
def test_every_public_name_is_importable(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(module, name) is not None
        assert name in dir(module)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        module.nothing_like_it  # type: ignore[attr-defined]  # noqa: B018


def test_deprecated_names_are_aliases_of_the_current_ones() -> None:
    assert dynamo.llm.register_llm is dynamo.llm.register_model
    assert dynamo.llm.unregister_llm is dynamo.llm.unregister_model
    assert dynamo.llm.fetch_llm is dynamo.llm.fetch_model


def test_package_import_loads_no_submodules() -> None:
    code = (
        "import sys, dynamo.runtime, dynamo.llm;"
        "print([name for name in sys.modules if name.startswith('dynamo.') or name in ('asyncio', 'msgspec')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['dynamo.core', 'dynamo.core.lazy', 'dynamo.runtime', 'dynamo.llm']"


def test_worker_does_not_import_the_http_service() -> None:
    code = (
        "import sys; from dynamo.llm import ModelInput, ModelType, WorkerType, register_model;"
        "from dynamo.runtime import DistributedRuntime, dynamo_worker;"
        "print([name for name in ('uvicorn', 'starlette', 'tokenizers', 'numpy', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
