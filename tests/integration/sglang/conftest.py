"""The fixtures of the unit tests of the SGLang adapter."""

from tests.unit.sglang.conftest import start  # noqa: F401 - a fixture
