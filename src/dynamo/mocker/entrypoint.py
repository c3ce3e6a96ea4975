"""Entrypoint: the mocker as an engine of `make_engine` and `run_input` in upstream's Python API."""

from dynamo.backend.worker import EngineWorker
from dynamo.core.boundaries import AsyncRollback
from dynamo.llm.entrypoint import EntrypointArgs
from dynamo.mocker.canonical import read_settings, settings_of
from dynamo.mocker.config import MockerConfig
from dynamo.mocker.engine import MockerEngine
from dynamo.runtime.distributed import DistributedRuntime


class MockerService:
    """A mocker behind an endpoint of a runtime that the caller created."""

    def __init__(self, runtime: DistributedRuntime, args: EntrypointArgs, path: str) -> None:
        config = config_of(args, path)
        self._runtime = runtime
        self._worker = EngineWorker(config, MockerEngine(config), runtime, on_failure=self._fail)

    async def start(self) -> None:
        """Serve the endpoint and register the model. Raise `ConfigError`."""
        async with AsyncRollback(self.stop):
            await self._worker.start()

    def _fail(self, _: BaseException) -> None:
        """Shut the runtime down after a fatal error of the worker."""
        self._runtime.shutdown()

    async def stop(self) -> None:
        """Stop the engine and then the runtime."""
        await self._worker.stop(drain_s=0.0)


def config_of(args: EntrypointArgs, path: str) -> MockerConfig:
    """Return the mocker's configuration. Raise `InvalidArgument` for a setting that this release does not support."""
    settings = settings_of(args.mocker_engine_args or {})
    if args.extra_engine_args is not None:
        settings |= settings_of(read_settings(args.extra_engine_args, "extra_engine_args"))
    if args.kv_cache_block_size is not None:
        settings.setdefault("block_size", args.kv_cache_block_size)
    return MockerConfig(
        model_path=args.model_path,
        model_name=args.model_name,
        endpoint=path,
        custom_jinja_template=args.template_file,
        **settings,
    )


async def serve(runtime: DistributedRuntime, args: EntrypointArgs, path: str) -> MockerService:
    """Start a mocker and return it."""
    made = MockerService(runtime, args, path)
    await made.start()
    return made
