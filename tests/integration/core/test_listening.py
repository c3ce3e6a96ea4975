"""Sockets bound to ports of this machine."""

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.listening import bind


@pytest.mark.parametrize(("setting", "given"), [("--port", "--port %d"), ("DYN_PORT", "DYN_PORT=%d")])
def test_bind_names_the_setting_of_a_port_that_cannot_be_used(setting: str, given: str) -> None:
    with bind("127.0.0.1", 0, "--port") as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=given % port):
            bind("127.0.0.1", port, setting)
    with pytest.raises(ConfigError, match=given % 99999):
        bind("127.0.0.1", 99999, setting)
