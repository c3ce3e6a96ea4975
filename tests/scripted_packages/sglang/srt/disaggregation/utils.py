"""The host that nobody is."""

from tests.unit.sglang.scripted import FAKE_BOOTSTRAP_HOST

__all__ = ["FAKE_BOOTSTRAP_HOST"]
