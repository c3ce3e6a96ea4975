"""Upstream's tests, as the released package contains them, pass with this package as docs/reference/upstream-tests.md lists."""

from pathlib import Path

import pytest
from tests.cluster.peers import require_peer
from tools import upstream_page
from tools.upstream_tests import environment, packages, run

pytestmark = pytest.mark.conformance

FILE_TIMEOUT_S = 60.0
SUBSET = (
    "common/backend/tests/test_backend_bindings.py",
    "common/backend/tests/test_engine.py",
    "common/backend/tests/test_publisher.py",
    "common/tests/configuration/test_kv_router_args.py",
    "common/tests/configuration/test_runtime_args.py",
    "common/tests/http/test_url_validator.py",
    "common/tests/lora/test_manager.py",
    "common/tests/multimodal/test_image_loader.py",
    "common/tests/test_rl_admin.py",
    "common/tests/test_storage.py",
    "common/utils/tests/test_nixl_telemetry.py",
    "frontend/tests/test_frontend_utils.py",
    "frontend/tests/test_multimodal_utils.py",
    "frontend/tests/test_structural_tag_policy.py",
    "global_router/tests/test_agg_routing.py",
    "global_router/tests/test_priority_retry.py",
    "global_router/tests/test_priority_routing.py",
    "kv_dc_relay/tests/test_cli.py",
    "mocker/tests/unit/test_config.py",
    "replay/tests/test_api_telemetry.py",
    "router/tests/test_standalone_router.py",
    "squeeze_evolve/tests/test_orchestrator.py",
    "thunderagent_router/tests/test_router.py",
)
"""One or two files of each package, under a minute together; `python -m tools.upstream_tests` runs all of them."""


@pytest.fixture(scope="module")
def ours() -> str:
    """Return the interpreter of the environment with this package."""
    require_peer()
    return environment("ours")


@pytest.mark.parametrize("name", SUBSET)
def test_upstream_file_passes_the_listed_number_of_tests(ours: str, name: str) -> None:
    root = packages(Path(require_peer()).parents[1]) / "dynamo"
    found = run(ours, root / name, root, FILE_TIMEOUT_S)
    assert found.passed >= upstream_page.read()[name].ours, found.reasons
