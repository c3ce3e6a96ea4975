"""The mocker's flags have upstream's names and defaults, and are judged before anything starts."""

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.unsupported_flags import UnsupportedFlag, declared_flags, drop_unsupported
from dynamo.mocker.canonical import settings_of
from dynamo.mocker.config import UNSUPPORTED_FLAGS, MockerConfig
from dynamo.mocker.simulation.timing import Timing

DECLARED = declared_flags(MockerConfig)


def read(*argv: str) -> MockerConfig:
    return load(MockerConfig, argv, {}, "mocker")


def test_mocker_defaults_equal_those_of_upstream() -> None:
    config = read()
    limits = config.limits()
    assert (limits.num_blocks, limits.block_tokens) == (16384, 64)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 8192)
    assert (limits.enable_prefix_caching, limits.enable_chunked_prefill, limits.preempts_oldest) == (True, True, False)
    assert config.timing() == Timing(1.0, 1.0)
    assert str(config.endpoint_id()) == "dynamo.backend.generate"


def test_flags_are_applied_to_the_simulation() -> None:
    config = read(
        "--num-gpu-blocks-override=10",
        "--no-enable-prefix-caching",
        "--no-enable-chunked-prefill",
        "--preemption-mode=fifo",
        "--speedup-ratio=0",
    )
    limits = config.limits()
    assert limits.num_blocks == 10
    assert (limits.enable_prefix_caching, limits.enable_chunked_prefill, limits.preempts_oldest) == (False, False, True)
    assert config.timing() == Timing(0.0, 1.0)


@pytest.mark.parametrize(
    "argument",
    [
        "--block-size=0",
        "--num-gpu-blocks-override=-1",
        "--max-num-seqs=0",
        "--max-model-len=0",
        "--data-parallel-size=0",
        "--num-workers=0",
        "--max-num-batched-tokens=100",
        "--speedup-ratio=-1",
        "--decode-speedup-ratio=-0.5",
        "--stagger-delay=-2",
        "--startup-time=-1",
        "--engine-type=tgi",
        "--preemption-mode=random",
        "--num-host-blocks=0",
        "--kv-transfer-bandwidth=-1",
        "--bootstrap-ports=1,2",
        "--zmq-replay-ports=5",
        "--sglang-schedule-conservativeness=2",
        "--reasoning={}",
        "--kv-transfer-timing-mode=half",
    ],
)
def test_out_of_range_value_is_refused_by_flag_name(argument: str) -> None:
    flag = argument.split("=")[0].removesuffix("-override")
    with pytest.raises(ConfigError, match=flag):
        read(argument)


def test_unknown_flag_error_suggests_the_nearest_flag() -> None:
    with pytest.raises(ConfigError, match="did you mean --speedup-ratio"):
        read("--speed-up-ratio=3")


def test_stagger_delay_depends_on_the_worker_number() -> None:
    assert read("--num-workers=3", "--stagger-delay=0.5").stagger_s(2) == 0.5
    auto = read("--num-workers=100", "--stagger-delay=-1")
    assert [auto.stagger_s(index) for index in (0, 1, 32)] == [0.0, 0.1, 2.1]
    assert read("--num-workers=200", "--stagger-delay=-1").stagger_s(1) == 0.2
    assert read("--num-workers=4", "--stagger-delay=-1").stagger_s(1) == 0.0


@pytest.mark.parametrize(("engine", "tokens"), [("vllm", 64), ("sglang", 1), ("trtllm", 32)])
def test_block_size_defaults_to_that_of_the_engine_type(engine: str, tokens: int) -> None:
    assert read(f"--engine-type={engine}").limits().block_tokens == tokens
    assert read(f"--engine-type={engine}", "--block-size=8").limits().block_tokens == 8


def test_sglang_page_size_sets_the_block_size() -> None:
    assert read("--engine-type=sglang", "--sglang-page-size=16").block_tokens == 16
    with pytest.raises(ConfigError, match="--sglang-page-size"):
        read("--engine-type=sglang", "--sglang-page-size=16", "--block-size=8")


def test_prefill_and_decode_workers_have_their_own_components() -> None:
    assert str(read("--disaggregation-mode=prefill").endpoint_id()) == "dynamo.prefill.generate"
    assert str(read("--is-decode-worker").endpoint_id()) == "dynamo.backend.generate"


def test_host_tier_requires_vllm_and_prefix_caching() -> None:
    for other in ("--engine-type=sglang", "--no-enable-prefix-caching"):
        with pytest.raises(ConfigError, match="--num-host-blocks"):
            read("--num-host-blocks=8", other)
    with pytest.raises(ConfigError, match="--host-offload"):
        read("--host-offload-d2h-bandwidth-gbps=3")
    host = read("--num-host-blocks=8", "--kv-bytes-per-token=10", "--host-offload-h2d-bandwidth-gbps=3").limits().host
    assert host is not None
    assert (host.num_blocks, host.block_bytes, host.to_host_gbps, host.to_device_gbps) == (8, 640, 32.0, 3.0)


def test_card_carries_the_router_mode() -> None:
    routing = read("--router-mode=kv", "--active-decode-blocks-threshold=0.5").routing()
    assert routing is not None
    assert routing.on_card()["router_mode"] == "k_v"
    assert routing.on_card()["load_threshold_config"] == {"active_decode_blocks_threshold": 0.5}
    assert read().routing() is None


def test_card_carries_the_kv_router_settings() -> None:
    flags = (
        "--router-temperature=0.5",
        "--router-queue-threshold=3",
        "--no-router-kv-events",
        "--shared-cache-type=none",
    )
    routing = read("--router-mode=kv", *flags).routing()
    assert routing is not None
    output = routing.on_card()["kv_router_config"]
    assert (output["router_temperature"], output["router_queue_threshold"], output["use_kv_events"]) == (
        0.5,
        3.0,
        False,
    )
    plain = read("--router-mode=random", "--router-session-affinity-ttl-secs=60").routing()
    assert plain is not None
    assert plain.on_card()["session_affinity_ttl_secs"] == 60


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--active-decode-blocks-threshold=0.5"], "--active-decode-blocks-threshold: .*--router-mode"),
        (["--router-temperature=1"], "--router-temperature: .*--router-mode"),
        (["--router-mode=random", "--router-temperature=1"], "--router-temperature: .*--router-mode kv"),
        (["--router-mode=kv", "--router-temperature=-1"], "router_temperature"),
        (["--router-mode=kv", "--router-approximate-cache-policy=lru"], "use_kv_events"),
        (["--router-mode=kv", "--router-session-affinity-ttl-secs=0"], "session_affinity_ttl_secs"),
    ],
)
def test_router_flags_that_a_card_cannot_carry_are_refused(flags: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read(*flags)


@pytest.mark.parametrize(
    "one", [one for one in UNSUPPORTED_FLAGS if one.flag not in DECLARED], ids=lambda one: one.flag
)
def test_unsupported_flag_is_refused_unless_it_has_its_default_value(one: UnsupportedFlag) -> None:
    with pytest.raises(ConfigError, match=one.flag):
        drop_unsupported(
            UNSUPPORTED_FLAGS,
            [f"{one.flag}={not one.default if isinstance(one.default, bool) else 'otherwise'}"],
            {},
            DECLARED,
        )
    assert drop_unsupported(UNSUPPORTED_FLAGS, [f"{one.flag}={one.default}"], {}, DECLARED) == []


def test_routing_variables_of_a_frontend_are_not_refused() -> None:
    assert drop_unsupported(UNSUPPORTED_FLAGS, [], {"DYN_ROUTER_TEMPERATURE": "1"}, DECLARED) == []


def test_refusal_of_aisimulate_names_the_alternative() -> None:
    with pytest.raises(ConfigError, match=r"package aisimulate.*--planner-profile-data"):
        drop_unsupported(UNSUPPORTED_FLAGS, ["--ais-perf-model"], {}, DECLARED)
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override"):
        drop_unsupported(UNSUPPORTED_FLAGS, ["--gpu-memory-utilization", "0.5"], {}, DECLARED)
    ais = {"engine": {"timing_model": {"type": "external", "provider": "ais", "config": {}}}}
    with pytest.raises(InvalidArgument, match="package aisimulate"):
        settings_of(ais)
