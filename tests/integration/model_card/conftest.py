"""The model directory of the unit tests."""

from tests.unit.conftest import model_dir  # noqa: F401 - a fixture
