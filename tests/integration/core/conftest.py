"""The fixtures of the unit tests of core."""

from tests.unit.core.test_span_events import log  # noqa: F401 - a fixture
