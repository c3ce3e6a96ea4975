"""Life of a snapshot in the process that is captured."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dynamo.common.configuration.utils import set_env
from dynamo.common.snapshot.constants import (
    READY_FOR_SNAPSHOT_FILE,
    RESTORE_COMPLETE_FILE,
    SNAPSHOT_COMPLETE_FILE,
    SNAPSHOT_CONTROL_DIR_ENV,
)
from dynamo.core.config import environ

logger = logging.getLogger(__name__)

EngineT = TypeVar("EngineT")

SENTINEL_POLL_INTERVAL_SEC = 0.1
CAPTURE_ENV = {
    "NCCL_IB_DISABLE": "1",  # InfiniBand connections cannot be restored.
    "NCCL_RAS_ENABLE": "0",  # Nor the state of its monitoring threads,
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # which would end the restored process.
    "HF_HUB_OFFLINE": "1",  # Nor connections to the hub.
}


def is_snapshot_enabled() -> bool:
    """Return whether this process is started to be captured."""
    return bool(environ().get(SNAPSHOT_CONTROL_DIR_ENV))


class SnapshotConfig:
    """Directory through which the process and the snapshot agent communicate."""

    def __init__(self, control_dir: str) -> None:
        self.control_dir = control_dir
        self.ready_file = str(Path(control_dir) / READY_FOR_SNAPSHOT_FILE)

    @classmethod
    def from_env(cls) -> "SnapshotConfig | None":
        """Return the configuration of the environment; None without one."""
        control_dir = environ().get(SNAPSHOT_CONTROL_DIR_ENV)
        return cls(control_dir) if control_dir else None

    async def run_lifecycle(self, pause_controller: Any, *pause_args: object) -> bool:
        """Pause the engine and wait. Return True in a restored process, whose engine is still paused."""
        await pause_controller.pause(*pause_args)
        control = Path(self.control_dir)
        try:
            Path(self.ready_file).write_text("ready", encoding="utf-8")  # noqa: ASYNC240 -- one word
            logger.info("ready for the snapshot; waiting for a file in %s", control)
            while not (is_captured := (control / SNAPSHOT_COMPLETE_FILE).exists()):
                if (control / RESTORE_COMPLETE_FILE).exists():
                    break
                await asyncio.sleep(SENTINEL_POLL_INTERVAL_SEC)
        finally:
            for path in (Path(self.ready_file), control / SNAPSHOT_COMPLETE_FILE):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    logger.warning("cannot remove %s: %s", path, error)
        if not is_captured:
            set_env("HF_HUB_OFFLINE", None)
        return not is_captured


def configure_snapshot_capture_env() -> None:
    """Disable what cannot be captured, before the engine starts."""
    for name, value in CAPTURE_ENV.items():
        before = environ().get(name)
        if before and before != value:
            logger.warning("%s=%r is replaced by %r: required for snapshots", name, before, value)
        set_env(name, value)
    if "TORCH_NCCL_DUMP_ON_TIMEOUT" not in environ():
        set_env("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


@dataclass
class EngineSnapshotController(Generic[EngineT]):
    """An engine that waits for its restoration."""

    engine: EngineT
    pause_controller: Any
    snapshot_config: SnapshotConfig
    pause_args: tuple[object, ...] = ()

    async def wait_for_restore(self) -> bool:
        """Pause the engine. Return True in a restored process."""
        return await self.snapshot_config.run_lifecycle(self.pause_controller, *self.pause_args)


async def elect_and_wake(
    pause_controller: Any,
    runtime: Any | None = None,
    *,
    lock_path: str | None = None,
    failover_metrics: Any = None,
) -> Any | None:
    """Resume a paused engine, as a standby only once it holds the lock at `lock_path`. Return the lock."""
    path = environ().get("FAILOVER_LOCK_PATH") if lock_path is None else lock_path
    lock = await _won_election(path, runtime, failover_metrics) if path else None
    await pause_controller.resume()
    pause_controller.mark_resumed()
    return lock


async def _won_election(path: str, runtime: Any | None, metrics: Any) -> Any:
    """Return the lock at `path` once this engine holds it; until then it is healthy as a standby."""
    try:
        from gpu_memory_service.failover_lock.flock import (  # type: ignore[import-not-found,unused-ignore]
            FlockFailoverLock,
        )
    except ImportError:
        raise ImportError("FAILOVER_LOCK_PATH requires the gpu_memory_service package") from None
    lock = FlockFailoverLock(path)
    _report(metrics, "standby")
    if runtime is not None:
        runtime.set_health_status(True)
    await lock.acquire(engine_id=f"engine-{environ().get('ENGINE_ID', '0')}")
    _report(metrics, "waking", is_switch=lock.was_contended)
    return lock


def _report(metrics: Any, state: str, *, is_switch: bool = False) -> None:
    """Set the state of this engine in the failover metrics, if there are any."""
    if metrics is not None:
        metrics.set_state(state)
        if is_switch:
            metrics.record_switch_attempt()
