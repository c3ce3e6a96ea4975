"""Entrypoint: which engines and inputs there are. The frontend it runs is in the integration tests."""

from pathlib import Path
from typing import Any, cast

import pytest

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.llm import EngineType, EntrypointArgs, make_engine, run_input
from dynamo.llm.entrypoint import MOCKER_ONLY, NOT_HONOURED, echo
from dynamo.runtime.distributed import DistributedRuntime


def test_entrypoint_args_are_positional_or_keyword_as_in_upstream() -> None:
    args = EntrypointArgs(EngineType.Echo, "dir", "name", migration_limit=3, metrics_prefix="p")
    assert (args.model_path, args.model_name, args.migration_limit, args.metrics_prefix) == ("dir", "name", 3, "p")
    with pytest.raises(TypeError):
        EntrypointArgs(EngineType.Echo, modell_path="dir")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", NOT_HONOURED)
def test_unsupported_entrypoint_argument_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        EntrypointArgs(EngineType.Dynamic, **{name: "x"})  # type: ignore[arg-type]


def test_unknown_engine_type_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="engine_type"):
        EntrypointArgs(cast(Any, "echo"))


@pytest.mark.parametrize("name", MOCKER_ONLY)
def test_mocker_arguments_are_accepted_only_for_the_mocker(name: str) -> None:
    EntrypointArgs(EngineType.Mocker, **{name: cast(Any, "x")})
    with pytest.raises(InvalidArgument, match=name):
        EntrypointArgs(EngineType.Echo, **{name: cast(Any, "x")})


async def test_invalid_inputs_are_refused(tmp_path: Path) -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    with pytest.raises(ConfigError, match="model_path"):
        await make_engine(runtime, EntrypointArgs(EngineType.Echo))
    engine = await make_engine(runtime, EntrypointArgs(EngineType.Dynamic))
    with pytest.raises(ConfigError, match="model_path"):
        await make_engine(runtime, EntrypointArgs(EngineType.Mocker))
    for wrong in ("carrier pigeon", "dyn://a.b.c"):
        with pytest.raises(ConfigError, match="input"):
            await run_input(runtime, wrong, engine)
    metrics = await make_engine(runtime, EntrypointArgs(EngineType.Dynamic, http_metrics_port=1))
    with pytest.raises(ConfigError, match="http_metrics_port"):
        await run_input(runtime, "http", metrics)
    with pytest.raises(ConfigError, match="frontend_route_extensions"):
        await run_input(runtime, "dyn://a.b.c", engine, [cast(Any, object())])
    nowhere = await make_engine(runtime, EntrypointArgs(EngineType.Echo, str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="no such directory"):
        await run_input(runtime, "dyn://a.b.c", nowhere)
    await runtime.shutdown()


@pytest.mark.parametrize(("budget", "message"), [(None, [1, 2, 3]), (2, [1, 2]), (0, [])])
async def test_echo_engine_returns_the_prompt_within_the_token_budget(budget: int | None, message: list[int]) -> None:
    outputs = [output async for output in echo({"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": budget}})]
    assert [token for output in outputs for token in output["token_ids"]] == message
    assert [output.get("finish_reason") for output in outputs if "finish_reason" in output] == [
        "length" if message else "stop"
    ]
