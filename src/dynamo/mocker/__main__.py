"""`python -m dynamo.mocker`: simulated workers."""

import itertools
import sys

from dynamo.core.config import exit_on_config_error
from dynamo.core.interpreter import paused_collections


def main() -> int:
    """Run until a stop signal; return the exit status."""
    with paused_collections():
        from dynamo.backend.process import run_worker
        from dynamo.core.unsupported_flags import load
        from dynamo.mocker.canonical import with_extra
        from dynamo.mocker.config import UNSUPPORTED_FLAGS, MockerConfig
        from dynamo.mocker.engine import MockerEngine

    config = with_extra(load(MockerConfig, sys.argv[1:], UNSUPPORTED_FLAGS, prog="python -m dynamo.mocker"))
    numbers = itertools.count()
    return run_worker(
        config,
        lambda: MockerEngine(config, next(numbers)),
        count=config.num_workers,
        delay_before_s=config.stagger_s,
    )


if __name__ == "__main__":
    exit_on_config_error(main)
