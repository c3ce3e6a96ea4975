"""Options: one declaration becomes flag, variable, default and help, and every mistake a line that helps."""

import dataclasses
import enum
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
    without_secrets,
)
from dynamo.core.errors import ConfigError, StartupError


class Mode(enum.StrEnum):
    FAST = "fast"
    SAFE = "safe"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kitchen:
    """Cooks.

    And washes up.
    """

    dish: str | None = option(None, "DISH", None, "What to cook")
    port: int = option(8000, "--port", "KITCHEN_PORT", "Where to knock")
    heat: float = option(1.0, "--heat", "KITCHEN_HEAT", "100 % is 1.0")
    gas: bool = option(False, "--gas", "KITCHEN_GAS", "Cook with gas")
    wash: bool = option(True, "--wash", "KITCHEN_WASH", "Wash up")
    name: str | None = option(None, "--name", "KITCHEN_NAME", "What it is called", aliases=["--called"])
    mode: Mode = option(Mode.SAFE, "--mode", "KITCHEN_MODE", "How", choices=list(Mode))
    spices: list[str] = option(["salt"], "--spices", "KITCHEN_SPICES", "What goes in, 100 %")
    counts: list[int] = option([], "--counts", None, "How many")

    def __post_init__(self) -> None:
        if self.heat < 0:
            raise ConfigError("--heat must be zero or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hall:
    """Serves."""

    port: int = option(9000, "--port", "HALL_PORT", "Declared by the kitchen already")
    tables: int = option(4, "--tables", None, "Where guests sit")


def kitchen(*argv: str, **variables: str) -> Kitchen:
    return load(Kitchen, argv, variables, prog="kitchen")


def test_defaults_hold_when_nothing_is_said() -> None:
    assert kitchen() == Kitchen()


def test_the_environment_beats_the_default_and_the_command_line_beats_both() -> None:
    assert kitchen(KITCHEN_PORT="1").port == 1
    assert kitchen("--port", "2", KITCHEN_PORT="1").port == 2
    assert kitchen("--port=3").port == 3


def test_an_empty_variable_counts_as_unset() -> None:
    assert kitchen(KITCHEN_PORT="").port == 8000


@pytest.mark.parametrize("word", sorted(TRUE))
def test_every_word_for_true_is_read(word: str) -> None:
    assert read_bool(f" {word.upper()} ")


@pytest.mark.parametrize("word", sorted(FALSE))
def test_every_word_for_false_is_read(word: str) -> None:
    assert not read_bool(word)


def test_a_boolean_has_a_flag_for_each_answer_and_a_variable() -> None:
    assert kitchen("--gas").gas
    assert not kitchen("--no-wash").wash
    assert kitchen(KITCHEN_GAS="on").gas
    assert not kitchen("--no-gas", KITCHEN_GAS="1").gas


def test_a_list_takes_commas_and_drops_what_is_empty() -> None:
    assert kitchen("--spices", "pepper, thyme,").spices == ["pepper", "thyme"]
    assert kitchen("--counts", "1,2").counts == [1, 2]
    assert kitchen(KITCHEN_SPICES="mint").spices == ["mint"]


def test_a_repeated_list_flag_adds_to_the_list() -> None:
    assert kitchen("--spices", "pepper", "--spices", "thyme,mint").spices == ["pepper", "thyme", "mint"]


def test_a_default_list_is_not_shared_between_instances() -> None:
    kitchen().spices.append("chili")
    assert kitchen().spices == ["salt"]


def test_a_repeated_list_flag_does_not_change_the_default() -> None:
    kitchen("--spices", "pepper")
    assert kitchen().spices == ["salt"]


def test_an_alias_means_the_same() -> None:
    assert kitchen("--called", "Anna").name == "Anna"


def test_a_positional_word_is_found_before_after_and_between_flags() -> None:
    assert kitchen("soup", "--port", "1").dish == "soup"
    assert kitchen("--port", "1", "soup").dish == "soup"
    assert kitchen("--port", "1", "soup", "--gas").dish == "soup"


def test_a_member_of_a_closed_set_is_read_as_that_member() -> None:
    assert kitchen("--mode", "fast").mode is Mode.FAST
    assert kitchen(KITCHEN_MODE="fast").mode is Mode.FAST


@pytest.mark.parametrize(
    ("argv", "variables", "said"),
    [
        (["--prot", "1"], {}, "unknown argument --prot; did you mean --port?"),
        (["--prot=1"], {}, "unknown argument --prot; did you mean --port?"),
        (["--zzz"], {}, "unknown argument --zzz"),
        (["soup", "cake"], {}, "unknown argument cake"),
        (["--port", "x"], {}, "--port: 'x': expected a whole number"),
        (["--port"], {}, "--port: expected one argument"),
        (["--mode", "slow"], {}, "--mode"),
        (["--heat", "-1"], {}, "--heat must be zero or more"),
        ([], {"KITCHEN_PORT": "x"}, "KITCHEN_PORT='x': expected a whole number"),
        ([], {"KITCHEN_GAS": "maybe"}, "KITCHEN_GAS='maybe': expected true or false"),
        ([], {"KITCHEN_HEAT": "hot"}, "KITCHEN_HEAT='hot': expected a number"),
        ([], {"KITCHEN_MODE": "slow"}, "KITCHEN_MODE='slow': expected one of fast, safe"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(argv: list[str], variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Kitchen, argv, variables, prog="kitchen")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flag_is_never_guessed_from_its_beginning() -> None:
    with pytest.raises(ConfigError, match="unknown argument --por"):
        kitchen("--por", "1")


def test_help_names_flag_variable_default_and_percent_signs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kitchen("--help")
    page = capsys.readouterr().out
    assert ended.value.code == 0
    assert page.startswith("usage: kitchen [DISH] [options]\n")
    for words in (
        "--port PORT",
        "[KITCHEN_PORT] (default: 8000)",
        "(default: salt)",
        "100 % is 1.0",
        "--no-wash",
        "DISH",
        "{fast,safe}",
    ):
        assert words in page


@pytest.mark.parametrize(
    "name", ["frontend.config.FrontendConfig", "cpu.config.CpuConfig", "mocker.config.MockerConfig",
             "openai_proxy.config.ProxyConfig", "router.config.RouterOptions", "trtllm.config.TrtllmConfig"],
)  # fmt: skip
def test_common_options_exist_and_the_short_help_is_short(name: str) -> None:
    module, _, type_name = name.rpartition(".")
    config_type = getattr(importlib.import_module(f"dynamo.{module}"), type_name)
    parser = build_parser(config_type, variables={}, prog="program")
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert set(config_type.COMMON) <= flags
    short = parser.format_short_help()
    assert [action.option_strings[0] for action in parser._actions if action.option_strings[0] not in short] == []
    assert len(short.splitlines()) < 90
    assert "program --help-all describes all of them." in short


def test_options_are_grouped_by_the_class_that_declares_them() -> None:
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Flat(Hall):
        """Has rooms."""

        rooms: int = option(1, "--rooms", None, "How many")

    page = build_parser(Flat, variables={}, prog="flat").format_help()
    assert page.index("options:") < page.index("--rooms") < page.index("\nServes:") < page.index("--port")


def test_a_parser_of_several_declares_a_shared_field_once() -> None:
    parser = build_parser(Kitchen, Hall, variables={"HALL_PORT": "1"}, prog="house")
    namespace = parser.parse_args(["--tables", "7"])
    assert from_namespace(Hall, namespace) == Hall(port=8000, tables=7)
    assert from_namespace(Kitchen, namespace) == Kitchen()


def test_flags_say_only_what_differs_from_the_defaults() -> None:
    assert as_flags(Kitchen()) == []
    assert as_flags(Kitchen(port=1, gas=True, wash=False)) == ["--port=1", "--gas", "--no-wash"]


configurations = st.builds(
    Kitchen,
    dish=st.none() | st.text(min_size=1).filter(lambda text: not text.startswith("-")),
    port=st.integers(),
    heat=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    gas=st.booleans(),
    wash=st.booleans(),
    name=st.none() | st.text(),
    mode=st.sampled_from(Mode),
    spices=st.lists(st.text(alphabet="abc-=", min_size=1).filter(lambda text: text != "--")),  # argparse drops that one
    counts=st.lists(st.integers()),
)


@settings(max_examples=40)
@given(configurations)
def test_flags_reproduce_the_configuration_they_were_made_from(config: Kitchen) -> None:
    assert load(Kitchen, as_flags(config), {}, prog="kitchen") == config


def test_a_setting_is_read_judged_and_defaulted() -> None:
    assert setting("N", 3, int, {}) == 3
    assert setting("N", 3, int, {"N": ""}) == 3
    assert setting("N", 3, int, {"N": "4"}) == 4
    with pytest.raises(ConfigError, match="N='x': expected a whole number"):
        setting("N", 3, int, {"N": "x"})


def test_a_wrong_option_ends_the_program_with_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ConfigError("no such flour")

    with pytest.raises(SystemExit) as ended:
        exit_on_config_error(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no such flour\n"


def test_refusal_by_the_machine_ends_the_program_with_one_line_and_status_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> int:
        raise StartupError("--port 1: the port is in use")

    with pytest.raises(SystemExit) as ended:
        exit_on_config_error(main)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: --port 1: the port is in use\n"


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_a_program_ends_with_the_status_its_main_returns(returned: int | None, status: int) -> None:
    with pytest.raises(SystemExit) as ended:
        exit_on_config_error(lambda: returned)
    assert ended.value.code == status


def test_a_dumped_configuration_can_be_read_back(tmp_path: Path) -> None:
    dump(Kitchen(mode=Mode.FAST, name="Anna"), str(tmp_path / "config.json"))
    written = typing.cast("dict[str, dict[str, object]]", json.loads((tmp_path / "config.json").read_text()))
    assert written["config"]["name"] == "Anna"
    assert written["config"]["mode"] == "fast"


def test_a_dump_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dump-config-to"):
        dump(Kitchen(), str(tmp_path / "no" / "config.json"))


def test_secrets_are_on_no_command_line() -> None:
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Safe:
        """Locks."""

        code: list[str] = option([], "--code", None, "What opens it", is_secret=True)
        port: int = option(1, "--port", None, "Where")

    config = load(Safe, ["--code", "a,b", "--code=c", "--port", "2"], {})
    assert config.code == ["a,b", "c"]
    assert as_flags(config) == ["--port=2"]
    assert without_secrets(Safe, ["--code", "a,b", "--code=c", "--port", "2"]) == ["--port", "2"]


def test_an_option_that_allows_no_blank_is_refused_by_name() -> None:
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
