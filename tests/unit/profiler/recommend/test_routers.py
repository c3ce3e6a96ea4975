import pytest

from dynamo.core.config import load
from dynamo.frontend.config import FrontendConfig
from dynamo.profiler.recommend.routers import KV_ROUTER, QUEUES, ROUTERS, RouterChoice
from dynamo.replay.modes import placement


def test_labels_differ() -> None:
    assert len({one.label() for one in ROUTERS}) == len(ROUTERS)


@pytest.mark.parametrize("router", ROUTERS, ids=RouterChoice.label)
def test_simulator_and_frontend_accept_every_choice(router: RouterChoice) -> None:
    placement(router.mode, router.settings(), 64, 1)
    config = load(FrontendConfig, router.flags(), prog="frontend")
    assert config.router_mode == router.flags()[1]
    assert config.prefill_load_scale == router.prefill_load_scale
    assert (config.router_queue_threshold, config.router_queue_policy) == (router.queue_threshold, router.queue_policy)


@pytest.mark.parametrize("router", ROUTERS, ids=RouterChoice.label)
def test_variables_are_equal_to_the_flags(router: RouterChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in router.variables().items():
        monkeypatch.setenv(name, value)
    assert load(FrontendConfig, [], prog="frontend") == load(FrontendConfig, router.flags(), prog="frontend")


def test_default_router_has_no_settings() -> None:
    assert KV_ROUTER.settings() == {}
    assert all(one.settings()["queue_threshold"] == 1.0 for one in QUEUES)
