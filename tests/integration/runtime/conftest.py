"""The fixtures of the unit tests of the runtime."""

from tests.unit.runtime.test_distributed import join  # noqa: F401 - a fixture
