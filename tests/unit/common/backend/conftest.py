"""Fixtures of the worker's tests for engines of the SDK."""

from tests.unit.backend.conftest import model_dir

__all__ = ["model_dir"]
