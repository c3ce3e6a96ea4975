"""Options of `dynamo serve`: each one reaches its component, and an invalid one is refused by name."""

import re
import sys
from pathlib import Path

import pytest

from dynamo.cli.announcement import Api
from dynamo.cli.options import PLANNED_MIGRATIONS, Options, ServeConfig, api_of, own_command, planner_config, read
from dynamo.core.errors import ConfigError

CALLS = "--dyn-tool-call-parser=hermes"
"""Format of the demo model's calls."""
LOOPBACK = "--http-host=127.0.0.1"


def options(*argv: str, **variables: str) -> Options:
    return read(argv, variables)


def test_serve_defaults_to_one_cpu_worker_with_the_demo_model() -> None:
    chosen = options()
    assert (chosen.serve.engine, chosen.serve.workers, chosen.is_demo) == ("cpu", 1, True)
    assert chosen.frontend_flags(chosen.frontend.http_port) == [LOOPBACK]
    assert chosen.engine_flags(cores=8) == [CALLS]


def test_each_flag_is_passed_to_the_process_that_declares_it(tmp_path: Path) -> None:
    chosen = options(str(tmp_path), "--router-mode", "random", "--max-num-seqs=3", "--http-port", "0")
    assert sorted(chosen.frontend_flags(9000)) == [LOOPBACK, "--http-port=9000", "--router-mode=random"]
    assert sorted(chosen.engine_flags(cores=1)) == ["--max-num-seqs=3", f"--model-path={tmp_path}"]
    assert not chosen.is_demo


def test_mocker_publishes_no_router_settings_in_place_of_the_policy_and_queue_of_the_frontend(tmp_path: Path) -> None:
    flags = ("--router-mode", "kv", "--router-queue-threshold", "2")
    chosen = options(str(tmp_path), "--engine", "mocker", *flags)
    assert "--router-queue-threshold=2.0" in chosen.frontend_flags(8000)
    assert not [one for one in chosen.engine_flags(cores=1) if one.startswith("--router-")]
    assert chosen.engine.routing() is None


def test_shared_flag_is_passed_to_frontend_and_engine() -> None:
    chosen = options("--namespace", "blue")
    assert "--namespace=blue" in chosen.frontend_flags(8000)
    assert "--namespace=blue" in chosen.engine_flags(cores=1)


def test_prefill_workers_count_where_the_cores_are_shared() -> None:
    chosen = options("--prefill-workers", "2")
    assert chosen.serve.prefill_workers == 2
    assert "--threads=1" in chosen.engine_flags(cores=8)


def test_engine_default_is_not_passed_to_the_frontend() -> None:
    assert not [flag for flag in options().frontend_flags(8000) if "namespace" in flag]


def test_variables_are_read_and_flags_take_precedence() -> None:
    variables = {"DYN_SERVE_ENGINE": "mocker", "DYN_SERVE_WORKERS": "3", "DYN_ROUTER_MODE": "random"}
    chosen = options("--workers", "2", **variables)
    assert (chosen.serve.engine, chosen.serve.workers, chosen.frontend.router_mode) == ("mocker", 2, "random")


def test_discovery_backend_is_set_by_its_flag_and_not_by_the_environment() -> None:
    assert options(DYN_DISCOVERY_BACKEND="etcd").frontend_flags(8000) == [LOOPBACK]
    chosen = options("--discovery-backend", "mem", DYN_DISCOVERY_BACKEND="etcd")
    assert "--discovery-backend=mem" in chosen.engine_flags(cores=1)


def test_flags_of_only_the_selected_engine_are_accepted() -> None:
    assert "--speedup-ratio=2.0" in options("--speedup-ratio", "2", "--engine", "mocker").engine_flags(cores=1)
    with pytest.raises(ConfigError, match="unknown argument --speedup-ratio"):
        options("--speedup-ratio", "2")


@pytest.mark.parametrize(("cores", "threads"), [(9, "--threads=4"), (8, "--threads=3"), (1, "--threads=1")])
def test_workers_of_a_large_model_share_the_cores(
    cores: int, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.cpu.blas.SMALL_MODEL_BYTES", 99)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert threads in options("--workers", "2", "--model-path", str(tmp_path)).engine_flags(cores)


def test_workers_of_a_small_model_have_one_thread_each() -> None:
    assert "--threads=1" in options("--workers", "2").engine_flags(cores=8)


def test_explicit_thread_count_is_kept_and_a_single_worker_uses_every_core() -> None:
    assert options("--workers", "2", "--threads", "3").engine_flags(cores=8) == [CALLS, "--threads=3"]
    assert options().engine_flags(cores=8) == [CALLS]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--wokers", "2"], "unknown argument --wokers; did you mean --workers?"),
        (["--rooter-mode=random"], "unknown argument --rooter-mode; did you mean --router-mode?"),
        (["--max-num-seq", "2"], "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (["--workers", "65"], "--workers 65: must be from 1 to 64"),
        (["--prefill-workers", "65"], "--prefill-workers 65: must be from 0 to 64"),
        (["--prefill-workers", "1", "--disaggregation-mode", "decode"], "mutually exclusive"),
        (["--workers", "two"], "--workers: 'two': expected a whole number"),
        (["--engine", "vlm"], "--engine: 'vlm': expected one of cpu, mocker"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0: expected 1 or more"),
        (["--http-port", "70000"], "--http-port 70000"),
        (["./no-such-directory"], "./no-such-directory: no such directory"),
        (["a", "b"], "unknown argument b"),
    ],
)
def test_option_error_is_one_line_with_its_name(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(*argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_model_and_model_path_flag_are_mutually_exclusive(tmp_path: Path) -> None:
    for flag in (["--model-path", "x"], ["--model-path=x"]):
        with pytest.raises(ConfigError, match="mutually exclusive"):
            options(str(tmp_path), *flag)


def test_hub_model_is_downloaded_once_and_served_under_its_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.model_card.hub.resolve_model", lambda name: str(tmp_path))
    assert set(options("owner/name").engine_flags(cores=1)) == {"--model-name=owner/name", f"--model-path={tmp_path}"}
    assert "--model-name=mine" in options("owner/name", "--model-name", "mine").engine_flags(cores=1)


def test_api_to_try_follows_the_template_and_the_kind_of_worker(tmp_path: Path) -> None:
    def api(*argv: str) -> Api:
        return api_of(options(*argv).engine)

    model = tmp_path / "model"
    model.mkdir()
    assert api(str(model)) is Api.COMPLETIONS
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert api(str(model)) is Api.CHAT
    (model / "tokenizer_config.json").write_text("{}")
    assert api(str(model)) is Api.COMPLETIONS
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert api(str(model)) is Api.CHAT
    assert api(str(model), "--endpoint-types", "completions") is Api.COMPLETIONS
    assert api() is api("--engine", "mocker") is Api.CHAT
    assert api("--embedding-worker") is Api.EMBEDDINGS
    assert api("--classify-worker") is Api.CLASSIFY


def help_page(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        options(*argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("flag", ["-h", "--help", "--help-all"])
def test_help_shows_the_options_of_all_three(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page(capsys, flag, "--engine", "mocker")
    for word in ("MODEL", "--workers", "--router-mode", "--speedup-ratio", "--help-all"):
        assert word in page


def test_short_help_names_every_option_and_describes_the_common_ones(capsys: pytest.CaptureFixture[str]) -> None:
    short, everything = help_page(capsys, "--help"), help_page(capsys, "--help-all")
    flags = set(re.findall(r"^  (--[a-z-]+)", everything, re.MULTILINE))
    assert len(flags) > 100
    assert [flag for flag in flags if flag not in short] == []
    assert len(short.splitlines()) <= 125 < len(everything.splitlines())
    described = set(re.findall(r"^  (--[a-z-]+)(?:, | \[?[A-Z{])", short, re.MULTILINE))
    assert set(ServeConfig.COMMON) - described == {"--speedup-ratio"}, "which is the mocker's"


def test_displayed_command_name_is_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bin" / "dynamo"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert own_command(str(script)) == "bin/dynamo"
    assert own_command("/elsewhere/dynamo") == "/elsewhere/dynamo"
    assert own_command("/elsewhere/cli/__main__.py") == f"{Path(sys.executable).name} -m dynamo.cli"
    monkeypatch.setenv("PATH", str(script.parent))
    assert own_command(str(script)) == "dynamo"


@pytest.mark.parametrize("flag", ["--kserve-grpc-server", "--interactive"])
def test_frontend_flags_without_an_http_api_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        options(flag)


def test_serve_passes_no_key_on_the_frontend_command_line() -> None:
    chosen = options("--api-key", "sk-a,secret", "--admin-api-key", "sk-b-secret", DYN_API_KEYS="sk-c-secret")
    assert not [word for word in chosen.frontend_flags(8000) if "secret" in word]
    assert (chosen.keys.keys, chosen.keys.admin_keys) == (("sk-a,secret", "sk-c-secret"), ("sk-b-secret",))
    assert chosen.needs_key and not options().needs_key


@pytest.mark.parametrize(("argv", "variables"), [(["--api-key", ""], {}), ([], {"DYN_API_KEYS": ","})])
def test_serve_refuses_an_empty_key(argv: list[str], variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"api-key|DYN_API_KEYS"):
        options(*argv, **variables)


def test_serve_listens_on_loopback_unless_a_host_is_given() -> None:
    assert options().frontend.http_host == options(DYN_HTTP_HOST="").frontend.http_host == "127.0.0.1"
    assert options("--http-host", "0.0.0.0").frontend.http_host == "0.0.0.0"
    assert options(DYN_HTTP_HOST="10.0.0.1").frontend.http_host == "10.0.0.1"


def test_planner_uses_the_namespace_of_the_workers() -> None:
    config = planner_config(options("--engine=mocker", "--namespace", "blue", "--planner", "--max-workers", "2"))
    assert config is not None
    assert config.namespace == "blue"


def test_directory_after_the_planner_flag_is_refused_with_a_hint(tmp_path: Path) -> None:
    chosen = options("--engine=mocker", "--planner", str(tmp_path), "--max-workers", "2")
    with pytest.raises(ConfigError, match="must be a file or inline JSON; put MODEL before --planner"):
        planner_config(chosen)


def test_settings_of_the_planner_may_be_longer_than_a_file_name() -> None:
    inline = '{"ttft_ms": 300, "log_dir": "' + "x" * 5000 + '"}'
    config = planner_config(options("--engine=mocker", "--planner", inline, "--max-workers", "2"))
    assert config is not None
    assert config.ttft_ms == 300


def test_requests_migrate_from_workers_that_a_planner_stops() -> None:
    planned = ("--engine=mocker", "--planner", "--max-workers=2")
    assert options(*planned).frontend.migration_limit == PLANNED_MIGRATIONS
    assert options(*planned, "--migration-limit", "0").frontend.migration_limit == 0
    assert options(*planned, DYN_MIGRATION_LIMIT="1").frontend.migration_limit == 1
    assert options("--engine=mocker").frontend.migration_limit == 0


def policy_of(*argv: str, **variables: str) -> list[str]:
    return [flag for flag in options(*argv, **variables).frontend_flags(8000) if flag.startswith("--router-policy")]


def test_serve_routes_by_the_balanced_policy_unless_another_cost_is_chosen() -> None:
    assert policy_of("--router-mode", "kv") == ["--router-policy=balanced"]
    assert policy_of() == []
    assert policy_of("--router-mode", "kv", "--router-policy", "dynamo") == []
    assert policy_of("--router-mode", "kv", DYN_ROUTER_POLICY="dynamo") == []
    assert policy_of("--router-mode", "kv", "--router-prefill-load-scale", "32") == []
    assert policy_of("--router-mode", "kv", "--load-aware") == []
