"""Options: one declaration becomes flag, variable, default and help, and every mistake a line that helps."""

import dataclasses
import enum
import errno
import importlib
import json
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.config import (
    FALSE,
    TRUE,
    as_flags,
    build_parser,
    dump,
    exit_on_config_error,
    from_namespace,
    load,
    option,
    read_bool,
    selected_environment,
    setting,
    split_arguments,
    without_secrets,
)
from dynamo.core.errors import ConfigError, StartupError


class Mode(enum.StrEnum):
    FAST = "fast"
    SAFE = "safe"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """Runs the application.

    And its cache.
    """

    model: str | None = option(None, "MODEL", None, "Model to load")
    port: int = option(8000, "--port", "APP_PORT", "Port to listen on")
    scale: float = option(1.0, "--scale", "APP_SCALE", "100 % is 1.0")
    verbose: bool = option(False, "--verbose", "APP_VERBOSE", "Log more")
    cache: bool = option(True, "--cache", "APP_CACHE", "Cache results")
    name: str | None = option(None, "--name", "APP_NAME", "Name", aliases=["--called"])
    mode: Mode = option(Mode.SAFE, "--mode", "APP_MODE", "Mode", choices=list(Mode))
    tags: list[str] = option(["default"], "--tags", "APP_TAGS", "Tags, 100 %")
    counts: list[int] = option([], "--counts", None, "Counts")

    def __post_init__(self) -> None:
        if self.scale < 0:
            raise ConfigError("--scale must be zero or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Serves."""

    port: int = option(9000, "--port", "SERVER_PORT", "Declared by the application already")
    workers: int = option(4, "--workers", None, "Number of workers")


def load_app(*argv: str, **variables: str) -> AppOptions:
    return load(AppOptions, argv, variables, prog="app")


def test_config_uses_defaults_without_flags_and_variables() -> None:
    assert load_app() == AppOptions()


def test_config_prefers_flag_over_variable_over_default() -> None:
    assert load_app(APP_PORT="1").port == 1
    assert load_app("--port", "2", APP_PORT="1").port == 2
    assert load_app("--port=3").port == 3


def test_config_treats_an_empty_variable_as_unset() -> None:
    assert load_app(APP_PORT="").port == 8000


@pytest.mark.parametrize("word", sorted(TRUE))
def test_config_reads_every_spelling_of_true(word: str) -> None:
    assert read_bool(f" {word.upper()} ")


@pytest.mark.parametrize("word", sorted(FALSE))
def test_config_reads_every_spelling_of_false(word: str) -> None:
    assert not read_bool(word)


def test_config_boolean_has_a_positive_and_a_negative_flag_and_a_variable() -> None:
    assert load_app("--verbose").verbose
    assert not load_app("--no-cache").cache
    assert load_app(APP_VERBOSE="on").verbose
    assert not load_app("--no-verbose", APP_VERBOSE="1").verbose


def test_config_list_splits_at_commas_and_drops_empty_items() -> None:
    assert load_app("--tags", "a, b,").tags == ["a", "b"]
    assert load_app("--counts", "1,2").counts == [1, 2]
    assert load_app(APP_TAGS="c").tags == ["c"]


def test_config_appends_repeated_list_flags() -> None:
    assert load_app("--tags", "a", "--tags", "b,c").tags == ["a", "b", "c"]


def test_config_default_list_is_not_shared_between_instances() -> None:
    load_app().tags.append("chili")
    assert load_app().tags == ["default"]


def test_config_repeated_list_flag_does_not_change_the_default() -> None:
    load_app("--tags", "a")
    assert load_app().tags == ["default"]


def test_config_alias_sets_the_same_option() -> None:
    assert load_app("--called", "Anna").name == "Anna"


def test_config_finds_a_positional_argument_before_after_and_between_flags() -> None:
    assert load_app("small", "--port", "1").model == "small"
    assert load_app("--port", "1", "small").model == "small"
    assert load_app("--port", "1", "small", "--verbose").model == "small"


def test_config_reads_a_choice_as_its_enum_member() -> None:
    assert load_app("--mode", "fast").mode is Mode.FAST
    assert load_app(APP_MODE="fast").mode is Mode.FAST


@pytest.mark.parametrize(
    ("argv", "variables", "message"),
    [
        (["--prot", "1"], {}, "unknown argument --prot; did you mean --port?"),
        (["--prot=1"], {}, "unknown argument --prot; did you mean --port?"),
        (["--zzz"], {}, "unknown argument --zzz"),
        (["small", "other"], {}, "unknown argument other"),
        (["--port", "x"], {}, "--port: 'x': expected a whole number"),
        (["--port"], {}, "--port: expected one argument"),
        (["--mode", "slow"], {}, "--mode"),
        (["--scale", "-1"], {}, "--scale must be zero or more"),
        ([], {"APP_PORT": "x"}, "APP_PORT='x': expected a whole number"),
        ([], {"APP_VERBOSE": "maybe"}, "APP_VERBOSE='maybe': expected true or false"),
        ([], {"APP_SCALE": "hot"}, "APP_SCALE='hot': expected a number"),
        ([], {"APP_MODE": "slow"}, "APP_MODE='slow': expected one of fast, safe"),
    ],
)
def test_config_error_is_one_line_that_names_the_option(
    argv: list[str], variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(AppOptions, argv, variables, prog="app")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_does_not_accept_abbreviated_flags() -> None:
    with pytest.raises(ConfigError, match="unknown argument --por"):
        load_app("--por", "1")


def test_help_shows_flag_variable_default_and_percent_signs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_app("--help")
    page = capsys.readouterr().out
    assert ended.value.code == 0
    assert page.startswith("usage: app [MODEL] [options]\n")
    for words in (
        "--port PORT",
        "[APP_PORT] (default: 8000)",
        "(default: default)",
        "100 % is 1.0",
        "--no-cache",
        "MODEL",
        "{fast,safe}",
    ):
        assert words in page


@pytest.mark.parametrize(
    "name", ["frontend.config.FrontendConfig", "cpu.config.CpuConfig", "mocker.config.MockerConfig",
             "openai_proxy.config.ProxyConfig", "router.main.RouterOptions", "trtllm.config.TrtllmConfig"],
)  # fmt: skip
def test_help_lists_common_options_and_its_summary_is_short(name: str) -> None:
    module, _, type_name = name.rpartition(".")
    config_type = getattr(importlib.import_module(f"dynamo.{module}"), type_name)
    parser = build_parser(config_type, variables={}, prog="program")
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert set(config_type.COMMON) <= flags
    short = parser.format_short_help()
    assert [action.option_strings[0] for action in parser._actions if action.option_strings[0] not in short] == []
    assert len(short.splitlines()) < 90
    assert "program --help-all describes all of them." in short


def test_help_groups_options_by_the_class_that_declares_them() -> None:
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Flat(ServerOptions):
        """Serves requests."""

        threads: int = option(1, "--threads", None, "Counts")

    page = build_parser(Flat, variables={}, prog="flat").format_help()
    assert page.index("options:") < page.index("--threads") < page.index("\nServes:") < page.index("--port")


def test_config_parser_of_several_classes_declares_a_shared_field_once() -> None:
    parser = build_parser(AppOptions, ServerOptions, variables={"SERVER_PORT": "1"}, prog="app")
    namespace = parser.parse_args(["--workers", "7"])
    assert from_namespace(ServerOptions, namespace) == ServerOptions(port=8000, workers=7)
    assert from_namespace(AppOptions, namespace) == AppOptions()


def test_config_to_flags_lists_only_non_default_options() -> None:
    assert as_flags(AppOptions()) == []
    assert as_flags(AppOptions(port=1, verbose=True, cache=False)) == ["--port=1", "--verbose", "--no-cache"]


configurations = st.builds(
    AppOptions,
    model=st.none() | st.text(min_size=1).filter(lambda text: not text.startswith("-")),
    port=st.integers(),
    scale=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    verbose=st.booleans(),
    cache=st.booleans(),
    name=st.none() | st.text(),
    mode=st.sampled_from(Mode),
    tags=st.lists(st.text(alphabet="abc-=", min_size=1).filter(lambda text: text != "--")),  # argparse drops that one
    counts=st.lists(st.integers()),
)


@settings(max_examples=40)
@given(configurations)
def test_config_to_flags_reproduces_the_configuration(config: AppOptions) -> None:
    assert load(AppOptions, as_flags(config), {}, prog="app") == config


def test_setting_is_read_validated_and_defaulted() -> None:
    assert setting("N", 3, int, {}) == 3
    assert setting("N", 3, int, {"N": ""}) == 3
    assert setting("N", 3, int, {"N": "4"}) == 4
    with pytest.raises(ConfigError, match="N='x': expected a whole number"):
        setting("N", 3, int, {"N": "x"})


def test_main_exits_with_one_line_and_status_two_for_an_invalid_option(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ConfigError("no such flour")

    with pytest.raises(SystemExit) as ended:
        exit_on_config_error(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no such flour\n"


def test_main_exits_with_one_line_and_status_one_for_a_startup_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> int:
        raise StartupError("--port 1: the port is in use")

    with pytest.raises(SystemExit) as ended:
        exit_on_config_error(main)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: --port 1: the port is in use\n"


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_main_exits_with_the_returned_status(returned: int | None, status: int) -> None:
    with pytest.raises(SystemExit) as ended:
        exit_on_config_error(lambda: returned)
    assert ended.value.code == status


def test_config_dump_can_be_read_back(tmp_path: Path) -> None:
    dump(AppOptions(mode=Mode.FAST, name="Anna"), str(tmp_path / "config.json"))
    written = typing.cast("dict[str, dict[str, object]]", json.loads((tmp_path / "config.json").read_text()))
    assert written["config"]["name"] == "Anna"
    assert written["config"]["mode"] == "fast"


def test_config_dump_error_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dump-config-to"):
        dump(AppOptions(), str(tmp_path / "no" / "config.json"))


def test_config_to_flags_contains_no_secrets() -> None:
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Safe:
        """Locks."""

        code: list[str] = option([], "--code", None, "What opens it", is_secret=True)
        port: int = option(1, "--port", None, "Where")

    config = load(Safe, ["--code", "a,b", "--code=c", "--port", "2"], {})
    assert config.code == ["a,b", "c"]
    assert as_flags(config) == ["--port=2"]
    assert without_secrets(Safe, ["--code", "a,b", "--code=c", "--port", "2"]) == ["--port", "2"]


def test_option_without_blank_refuses_a_blank_value_by_name() -> None:
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Safe:
        """Locks."""

        guard: str | None = option(None, "--guard", "SAFE_GUARD", "Who", allows_blank=False)

    assert load(Safe, [], {}).guard is None
    for argv, variables in ((["--guard", ""], {}), (["--guard= "], {}), ([], {"SAFE_GUARD": " "})):
        with pytest.raises(ConfigError, match=r"--guard|SAFE_GUARD"):
            load(Safe, argv, variables)


def test_selected_environment_has_named_and_prefixed_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_SECRET_KEY", "DYN_MM_LIMIT", "DYN_NAMED"):
        monkeypatch.setenv(name, "1")
    found = selected_environment(("DYN_NAMED",), ("DYN_MM_",))
    assert {name for name in found if name.startswith("DYN_")} == {"DYN_NAMED", "DYN_MM_LIMIT"}
    assert selected_environment(("DYN_NAMED",)) == {"DYN_NAMED": "1"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_main_exits_with_one_line_and_status_one_on_a_full_disk(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise OSError(number, "No space left on device", "/data/x")

    with pytest.raises(SystemExit) as ended:
        exit_on_config_error(main)
    assert ended.value.code == 1
    text = "error: /data/x: No space left on device; free space there, or choose another directory\n"
    assert capsys.readouterr().err == text


def test_other_errors_of_the_system_are_raised() -> None:
    def main() -> int:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        exit_on_config_error(main)


def test_arguments_of_another_program_follow_two_dashes() -> None:
    assert split_arguments(["m", "--workers", "2", "--", "--tp", "4", "--"]) == (
        ["m", "--workers", "2"],
        ["--tp", "4", "--"],
    )
    assert split_arguments(["m"]) == (["m"], [])
