"""Flags of two legs: what goes together, and what each kind of worker is routed by."""

from pathlib import Path

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.kv_router.config import RouterConfig
from dynamo.routing.policy_file import RouterPolicy
from dynamo.routing.prefill_options import DisaggregationOptions, config_of_stage


def options(*argv: str) -> DisaggregationOptions:
    return load(DisaggregationOptions, argv, {})


def test_prefill_workers_keep_no_blocks_and_decode_workers_are_not_asked_for_theirs() -> None:
    config = RouterConfig(track_output_blocks=True)
    prefill = config_of_stage(config, "prefill", None, options())
    assert (prefill.track_active_blocks, prefill.track_output_blocks, prefill.use_kv_events) == (False, False, True)
    decode = config_of_stage(config, "decode", None, options())
    assert (decode.track_active_blocks, decode.use_kv_events) == (True, False)
    assert config_of_stage(config, "aggregated", None, options()) == config


def test_who_may_compute_a_prompt_after_all_is_asked_what_it_holds() -> None:
    assert config_of_stage(RouterConfig(), "decode", None, options("--router-conditional-disagg")).use_kv_events


def test_each_stage_has_its_policy(tmp_path: Path) -> None:
    given = options("--router-prefill-policy=balanced", "--router-decode-policy=default")
    assert config_of_stage(RouterConfig(), "prefill", None, given).policy == "balanced"
    assert config_of_stage(RouterConfig(policy="balanced"), "decode", None, given).policy == "dynamo"
    path = tmp_path / "policy.yaml"
    path.write_text(
        "worker_selection:\n  prefill: calm\n  instances:\n"
        "    - {name: calm, parameters: {prefill_load_scale: 4}}\n"
        "    - {name: wild, parameters: {prefill_load_scale: 8}}\n"
    )
    policy = RouterPolicy.read(str(path))
    assert config_of_stage(RouterConfig(), "prefill", policy, options()).weights.prefill_load_scale == 4
    named = options("--router-prefill-policy=wild", "--router-decode-policy=calm")
    assert config_of_stage(RouterConfig(), "prefill", policy, named).weights.prefill_load_scale == 8, "the flag wins"
    assert config_of_stage(RouterConfig(), "decode", policy, named).weights.prefill_load_scale == 4
    with pytest.raises(ConfigError, match="nobody"):
        options("--router-decode-policy=nobody").check_disaggregation("kv", RouterConfig(), policy)


@pytest.mark.parametrize(
    ("argv", "mode", "config", "said"),
    [
        (("--router-conditional-disagg",), "round-robin", RouterConfig(), "--router-mode kv"),
        (("--router-conditional-disagg",), "kv", RouterConfig(use_kv_events=False), "--router-kv-events"),
        (("--router-conditional-disagg-config={}",), "kv", RouterConfig(), "requires --router-conditional-disagg"),
        (("--router-prefill-policy=default",), "random", RouterConfig(), "--router-prefill-policy"),
        (("--router-decode-policy=odd",), "kv", RouterConfig(), "--router-decode-policy odd"),
    ],
)
def test_what_does_not_go_together_is_refused(
    argv: tuple[str, ...], mode: str, config: RouterConfig, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        options(*argv).check_disaggregation(mode, config, None)


def test_what_goes_together_is_taken() -> None:
    given = options("--router-conditional-disagg", '--router-conditional-disagg-config={"policy":"prefill_load"}')
    given.check_disaggregation("kv", RouterConfig(queue_threshold=2.0), None)
    rule = given.conditional(2.0)
    assert rule is not None
    assert (rule.policy, rule.prefill_busy_threshold) == ("prefill_load", 2.0)
    assert options().conditional(None) is None
