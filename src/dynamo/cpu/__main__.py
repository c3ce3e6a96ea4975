"""Command: `python -m dynamo.cpu`, one worker with the embedded engine."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dynamo.backend.config import UNSUPPORTED_WORKER_FLAGS
from dynamo.core.config import environ, exit_on_config_error
from dynamo.core.interpreter import paused_collections
from dynamo.core.unsupported_flags import load
from dynamo.cpu import blas
from dynamo.cpu.config import CpuConfig

if TYPE_CHECKING:
    from dynamo.backend.engine import LLMEngine


def main() -> int:
    """Run the worker until it is stopped."""
    config = load(CpuConfig, sys.argv[1:], UNSUPPORTED_WORKER_FLAGS, prog="python -m dynamo.cpu")
    if config.model_path is not None and not os.path.isdir(config.model_path):
        from dynamo.model_card.hub import resolve_model

        directory = resolve_model(config.model_path)
        config = replace(config, model_path=directory, model_name=config.model_name or config.model_path)
    blas.prepare(config.threads or blas.suitable_threads(config.directory), environ())
    with paused_collections():  # The engines import numpy; must run after `prepare`.
        from dynamo.backend.process import run_worker

        make = engine_of(config)
    return run_worker(config, make)


def engine_of(config: CpuConfig) -> "Callable[[], LLMEngine]":
    """Return the factory of the engine that the configuration selects; the others are not imported."""
    if config.classify_worker:
        from dynamo.cpu.classify_engine import ClassifyEngine

        return lambda: ClassifyEngine(config)
    if config.embedding_worker:
        from dynamo.cpu.embedding_engine import EmbeddingEngine

        return lambda: EmbeddingEngine(config)
    from dynamo.cpu.engine import CpuEngine

    return lambda: CpuEngine(config)


if __name__ == "__main__":
    exit_on_config_error(main)
