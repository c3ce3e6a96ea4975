"""The models and engines of the unit tests of the CPU engine."""

from tests.unit.cpu.conftest import *  # noqa: F403 - its fixtures are found by name
from tests.unit.cpu.test_tiers import answers, tiered  # noqa: F401 - fixtures
