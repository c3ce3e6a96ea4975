"""Host name of fake bootstrap information, to which no connection is made."""

from tests.unit.sglang.scripted import FAKE_BOOTSTRAP_HOST

__all__ = ["FAKE_BOOTSTRAP_HOST"]
