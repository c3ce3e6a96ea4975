"""The mocker's command line as a namespace."""

from pathlib import Path

import pytest

from dynamo.mocker.args import parse_args


def test_mocker_args_have_upstream_names() -> None:
    args = parse_args(["--data-parallel-size", "2", "--num-gpu-blocks", "64", "--planner-profile-data", "p.npz"])
    assert (args.dp_size, args.num_gpu_blocks, args.block_size) == (2, 64, 64)
    assert args.planner_profile_data == Path("p.npz")
    assert (args.disaggregation_mode, args.is_prefill_worker, args.is_decode_worker) == ("agg", False, False)
    assert args.endpoint.endswith(".backend.generate")
    assert args.router_advertisement.router_mode is None


def test_prefill_worker_has_a_separate_endpoint_and_bootstrap_ports() -> None:
    args = parse_args(["--disaggregation-mode", "prefill", "--bootstrap-ports", "9001"])
    assert args.is_prefill_worker
    assert args.endpoint.endswith(".prefill.generate")
    assert args.bootstrap_ports_list == [9001]


def test_router_mode_flag_sets_the_router_advertisement() -> None:
    assert parse_args(["--router-mode", "kv"]).router_advertisement.router_mode == "kv"


def test_deprecated_flags_produce_a_warning() -> None:
    with pytest.warns(FutureWarning) as warnings:
        args = parse_args(
            ["--engine-type", "sglang", "--sglang-page-size=32", "--sglang-schedule-policy", "fcfs"],
        )
    assert (args.block_size, args.sglang_schedule_policy) == (32, "fifo")
    assert [str(warning.message).partition("use ")[2].rstrip(".") for warning in warnings] == [
        "--sglang-schedule-policy fifo",
        "--block-size",
    ]


def test_invalid_command_line_exits_with_one_error_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_args(["--num-workers", "0"])
    assert capsys.readouterr().err.startswith("error: --num-workers 0")
