"""tests/conformance/python_api.json is the public Python API of the installed released package."""

import json

import pytest
from benchmarks.peer import peer_python
from tests.cluster.peers import require_peer
from tools import python_api

pytestmark = pytest.mark.conformance


def test_committed_api_is_that_of_the_released_package() -> None:
    require_peer()
    assert json.loads(python_api.dumped(peer_python())) == python_api.released(), (
        f"run python -m tools.python_api --released {peer_python()}"
    )
