"""The fixtures of the unit tests of the mocker."""

from tests.unit.mocker.conftest import model_dir  # noqa: F401 - a fixture
