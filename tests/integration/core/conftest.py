"""The fixtures of the unit tests of core."""

from tests.unit.core.test_tracing import log  # noqa: F401 - a fixture
