"""Servers collect garbage rarely, and not what they made at start-up."""

import gc
import sys

from dynamo.core.interpreter import (
    SIMULATION_THRESHOLDS,
    SWITCH_INTERVAL_S,
    THRESHOLDS,
    configure_interpreter,
    rare_collections,
)


def test_configured_interpreter_exempts_existing_objects_and_collects_less_often() -> None:
    thresholds, interval, is_enabled = gc.get_threshold(), sys.getswitchinterval(), gc.isenabled()
    kept = [[number] for number in range(100)]
    before = gc.get_freeze_count()
    try:
        configure_interpreter()
        assert gc.get_freeze_count() >= before + len(kept)
        assert gc.get_threshold() == THRESHOLDS
        assert abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-6
        assert gc.isenabled() is is_enabled
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


def test_garbage_is_collected_seldom_within_the_block_and_as_before_after_it() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() == SIMULATION_THRESHOLDS
    assert gc.get_threshold() == before
