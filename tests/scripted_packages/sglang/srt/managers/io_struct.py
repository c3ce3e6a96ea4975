"""Messages between processes."""

from tests.unit.sglang.scripted import io_struct

globals().update(vars(io_struct))
