"""Options: one declaration holds the flag, the environment variable, the default and the help text of a setting.

A configuration is a frozen dataclass whose fields are made by `option()`. `load()` builds the parser from it
and returns an instance: defaults, overridden by the environment, overridden by the command line. Rules that span
fields belong in the dataclass's `__post_init__`, which raises `ConfigError`.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class FrontendConfig:
        \"\"\"OpenAI-compatible HTTP frontend.\"\"\"
        http_port: int = option(8000, "--http-port", "DYN_HTTP_PORT", "Port to listen on")

    config = load(FrontendConfig, sys.argv[1:], os.environ, prog="python -m dynamo.frontend")
"""

import argparse
import dataclasses
import enum
import inspect
import json
import os
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from dynamo import __version__
from dynamo.core.errors import FULL, ConfigError, StartupError

C = TypeVar("C")

CLOSED_PIPE = 141
"""Exit status of a program that SIGPIPE ends, which is what shells expect of one whose reader has ended."""

NO_EFFECT = "Accepted for compatibility; has no effect"
"""Prefix of the help of flags that are accepted for released command lines; a test checks for it."""

TRUE = frozenset({"1", "true", "yes", "on", "enabled"})
FALSE = frozenset({"0", "false", "no", "off", "disabled", ""})


def option(
    default: Any,
    flag: str,
    env: str | None,
    help: str,
    *,
    aliases: Sequence[str] = (),
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    is_secret: bool = False,
    allows_blank: bool = True,
    accepts_none: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """Return a dataclass field that is also a command-line flag and an environment variable.

    `flag` without leading dashes declares a positional argument (optional when it has a default).
    `default` may be a list (the flag then repeats or takes commas); it is copied for each instance. It may be a
    function without arguments where it depends on the rest of the environment.

    A secret is never part of `as_flags`, because every user of the machine can read command lines; a list of secrets
    is not split at commas, because a secret may contain one. `allows_blank=False` refuses a flag or variable that is
    present with a blank value: set it for options whose absence makes a server less safe. `accepts_none`: the text
    `None` is the value None, as in upstream, for options that a variable may set. `extra` is further metadata
    of the field, for its owner; `const` in it is the value of a flag that is given without one.
    """
    metadata = {
        "flag": flag,
        "env": env,
        "help": help,
        "aliases": tuple(aliases),
        "choices": choices,
        "metavar": metavar,
        "is_secret": is_secret,
        "allows_blank": allows_blank,
        "accepts_none": accepts_none,
        **(extra or {}),
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    if isinstance(default, types.FunctionType):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def read_bool(text: str) -> bool:
    """Parse a boolean; the only parser of booleans in options. Raises `ValueError` for other text."""
    word = text.strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def environ() -> Mapping[str, str]:
    """Return the process's environment; no other module reads it."""
    return os.environ


def setting(env: str, default: C, read: Callable[[str], C], variables: Mapping[str, str] | None = None) -> C:
    """Return one environment-only setting. Raises `ConfigError` with the variable's name and its value."""
    text = (os.environ if variables is None else variables).get(env)
    if text is None or text == "":
        return default
    try:
        return read(text)
    except ValueError as error:
        raise ConfigError(f"{env}={text!r}: expected {_kind(read)}{_why(read, error)}") from None


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that raises `ConfigError`, suggests similar flags, and has a short and a complete help."""

    common: Collection[str] = ()
    """The options described in the short help; without any, `--help` shows all."""

    def format_short_help(self) -> str:
        """Return the options by group: the common ones with their descriptions, of the others only the names."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        # Groups with common options first.
        for group in sorted(self._action_groups, key=lambda group: not any(map(self._is_common, group._group_actions))):
            others = [action for action in group._group_actions if not self._is_common(action)]
            formatter.start_section(group.title)
            formatter.add_arguments([action for action in group._group_actions if self._is_common(action)])
            if others:
                formatter.add_text("Also: " + "  ".join(action.option_strings[0] for action in others))
            formatter.end_section()
        formatter.add_text(f"{self.prog} --help-all describes all of them.")
        return formatter.format_help()

    def _is_common(self, action: argparse.Action) -> bool:
        return not action.option_strings or any(name in self.common for name in action.option_strings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r}: expected one of {', '.join(map(str, action.choices))}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self.describe_unknown(unknown[0]))
        return known

    def describe_unknown(self, argument: str) -> str:
        """Return one line that names the argument and a similar flag, if there is one."""
        import difflib

        word = argument.split("=", 1)[0]
        near = difflib.get_close_matches(word, list(self._option_string_actions), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"unknown argument {word}{hint}"


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=_help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrapped = textwrap.TextWrapper(
            width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        )
        return wrapped.fill(" ".join(text.split()))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, [], argparse.SUPPRESS):
            return action.help
        if isinstance(action.default, list):
            default = ",".join(map(_text, action.default)).replace("%", "%%")
            return f"{action.help} (default: {default})"
        return super()._get_help_string(action)


class _ListAction(argparse.Action):
    """Let the first use of a list flag replace the default, and the next ones add to it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        so_far = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if so_far is self.default else [*so_far, *values])


def _positionals(config_types: Sequence[type[Any]]) -> list[str]:
    flags = [
        field.metadata.get("flag", "-") for config_type in config_types for field in dataclasses.fields(config_type)
    ]
    return [flag for flag in flags if not flag.startswith("-")]


class _ShortHelpAction(argparse.Action):
    """`--help`: print the short help, or the complete one where no options are common."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser._print_message(parser.format_short_help() if parser.common else parser.format_help(), sys.stdout)
        parser.exit()


def _help_width() -> int:
    return min(110, _columns())


def _columns() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 100


def build_parser(*config_types: type[Any], variables: Mapping[str, str], prog: str | None = None) -> ArgumentParser:
    """Return a parser of all fields of the given configurations; a field or a flag that they share is declared once.

    Options are grouped by the class that declares them. The first class lists in `COMMON` the flags that
    the short help describes.
    """
    description = (config_types[0].__doc__ or "").strip()
    parser = ArgumentParser(
        prog=prog, description=description, formatter_class=_HelpFormatter, allow_abbrev=False, add_help=False
    )
    common = getattr(config_types[0], "COMMON", ())
    parser.common = (*common, "--help", "--help-all", "--version") if common else ()
    parser.add_argument("-h", "--help", action=_ShortHelpAction, nargs=0, help="Show the common options and exit")
    parser.add_argument("--help-all", action="help", help="Show all options and exit")
    parser.usage = " ".join(["%(prog)s", *(f"[{name}]" for name in _positionals(config_types)), "[options]"])
    parser.add_argument(
        "--version", action="version", version=f"dynamo {__version__}", help="Show the version and exit"
    )
    seen: set[str] = set()
    taken: set[str] = set()
    groups: dict[type[Any], Any] = {config_types[0]: parser}
    for config_type in config_types:
        hints = typing.get_type_hints(config_type)
        for field in dataclasses.fields(config_type):
            if "flag" in field.metadata and field.name not in seen:
                seen.add(field.name)
                names = [name for name in (field.metadata["flag"], *field.metadata["aliases"]) if name not in taken]
                taken.update(names)
                if names:
                    owner = _owner(config_type, field.name)
                    if owner not in groups:
                        groups[owner] = parser.add_argument_group(_title(owner))
                    _add(groups[owner], field, names, hints[field.name], variables)
    return parser


def _owner(config_type: type[Any], name: str) -> type[Any]:
    """Return the class of the hierarchy that declares a field."""
    return next(base for base in config_type.__mro__ if name in inspect.get_annotations(base))


def _title(config_type: type[Any]) -> str:
    return (config_type.__doc__ or config_type.__name__).strip().splitlines()[0].removesuffix(".")


def load(
    config_type: type[C], argv: Sequence[str], variables: Mapping[str, str] | None = None, prog: str | None = None
) -> C:
    """Return a configuration from the defaults, the environment and the command line, checked by `__post_init__`.

    Raises `ConfigError` for an unknown flag, a value of the wrong type or a violated rule.
    """
    variables = os.environ if variables is None else variables
    parser = build_parser(config_type, variables=variables, prog=prog)
    return from_namespace(config_type, parser.parse_args(list(argv)))


def from_namespace(config_type: type[C], namespace: argparse.Namespace) -> C:
    """Return one configuration from a namespace that may hold several."""
    fields = dataclasses.fields(config_type)  # type: ignore[arg-type]
    return config_type(**{field.name: getattr(namespace, field.name) for field in fields if "flag" in field.metadata})


def as_flags(config: Any) -> list[str]:
    """Return the command line that reproduces this configuration, without defaults and without secrets."""
    words: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = _default(field)
        flag = field.metadata.get("flag")
        if flag is None or value == default or value is None or field.metadata["is_secret"]:
            continue
        # One argument, so that a value which begins with a dash is not parsed as a flag.
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words.append(f"{flag}={','.join(map(_text, value))}")
        else:
            words.append(f"{flag}={_text(value)}" if flag.startswith("-") else _text(value))
    return words


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first `--`, and another program's arguments after it."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def exit_on_config_error(main: Callable[[], int | None]) -> NoReturn:
    """Run `main`; a `ConfigError` becomes one line on stderr and exit status 2, or 1 for a `StartupError` and a full disk.

    If the reader of the output ends, such as `head`, the exit status is that of a program ended by SIGPIPE.
    """
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # The interpreter flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CLOSED_PIPE)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1 if isinstance(error, StartupError) else 2)
    except OSError as error:
        if error.errno not in FULL:
            raise
        path = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"error: {path}{error.strerror}; free space there, or choose another directory\n")
        sys.exit(1)
    sys.exit(code or 0)


def dump(config: Any, path: str) -> None:
    """Write a configuration as JSON (`--dump-config-to`). Raises `ConfigError` if the file cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"config": dataclasses.asdict(config)}, file, indent=2, default=str)
    except OSError as error:
        raise ConfigError(f"--dump-config-to {path}: {error.strerror}") from None


def _add(
    group: Any, field: "dataclasses.Field[Any]", names: Sequence[str], hint: Any, variables: Mapping[str, str]
) -> None:
    meta = field.metadata
    read, is_list = _reader(hint)
    if meta["accepts_none"]:
        read = _NoneOr(read)
    flag, env = meta["flag"], meta["env"]
    default = _default(field)
    if env and not meta["allows_blank"] and env in variables and not variables[env].strip():
        raise ConfigError(f"{env}={variables[env]!r}: expected {_kind(read)} that is not blank, or no such variable")
    if env and variables.get(env) not in (None, ""):
        default = _read_variable(env, variables[env], read, is_list, meta["choices"])
    help_text = meta["help"].replace("%", "%%") + (f" [{env}]" if env else "")
    extra: dict[str, Any] = {"default": default, "help": help_text}
    if not flag.startswith("-"):
        group.add_argument(field.name, nargs="?", metavar=flag, type=_flag_reader(read), **extra)
        return
    if read is read_bool:
        group.add_argument(*names, dest=field.name, action=argparse.BooleanOptionalAction, **extra)
        return
    extra["metavar"] = meta["metavar"] or (None if meta["choices"] else flag.lstrip("-").rsplit("-", 1)[-1].upper())
    if is_list:
        items = _one_item_reader(read) if meta["is_secret"] else _list_reader(read)
        group.add_argument(*names, dest=field.name, type=_flag_reader(items, read), action=_ListAction, **extra)
    else:
        if "const" in meta:
            extra |= {"nargs": "?", "const": meta["const"]}
        reader = _flag_reader(read) if meta["allows_blank"] else _not_blank(_flag_reader(read))
        group.add_argument(*names, dest=field.name, type=reader, choices=meta["choices"], **extra)


@dataclasses.dataclass(frozen=True)
class _NoneOr:
    """Reader of a value that also accepts the text `None`."""

    read: Callable[[str], Any]

    def __call__(self, text: str) -> Any:
        return None if text.strip().lower() == "none" else self.read(text)


def _flag_reader(read: Callable[[str], Any], one: Any = None) -> Callable[[str], Any]:
    """Return a reader of a flag's value whose error contains the value and the expected type."""

    def of_flag(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected {_kind(one or read)}{_why(one or read, error)}"
            ) from None

    return of_flag


def _read_variable(env: str, text: str, read: Any, is_list: bool, choices: Sequence[str] | None) -> Any:
    try:
        value = _list_reader(read)(text) if is_list else read(text)
    except ValueError as error:
        expected = _kind(read) if choices is None else f"one of {', '.join(choices)}"
        raise ConfigError(f"{env}={text!r}: expected {expected}{_why(read, error)}") from None
    if choices is not None and value not in choices:
        raise ConfigError(f"{env}={text!r}: expected one of {', '.join(choices)}")
    return value


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _list_reader(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read(part.strip()) for part in text.split(",") if part.strip()]


def _one_item_reader(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read(text.strip())]


def _not_blank(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader of a flag's value that refuses blank text."""

    def of_flag(text: str) -> Any:
        if not text.strip():
            raise argparse.ArgumentTypeError(f"{text!r}: expected a value that is not blank")
        return read(text)

    return of_flag


def without_secrets(config_type: type[Any], argv: Sequence[str]) -> list[str]:
    """Return a command line that `load` accepts without its secret flags, each of which takes one value."""
    secret = {
        name
        for field in dataclasses.fields(config_type)
        if field.metadata.get("is_secret")
        for name in (field.metadata["flag"], *field.metadata["aliases"])
    }
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word in secret:
            next(words, None)
        elif word.partition("=")[0] not in secret:
            kept.append(word)
    return kept


def _reader(hint: Any) -> tuple[Any, bool]:
    """Return the function that reads one value of an annotation, and whether the annotation is a list."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return (read_bool if hint is bool else hint), False


def _text(value: Any) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value)


def _kind(read: Any) -> str:
    if isinstance(read, _NoneOr):
        return f"{_kind(read.read)}, or None"
    return _KINDS.get(read, "a valid value")


def _why(read: Any, error: ValueError) -> str:
    """Return the reader's own error text; empty for built-in types, whose errors only repeat the expected kind."""
    inner = read.read if isinstance(read, _NoneOr) else read
    return "" if inner in _KINDS else f" ({error})"


_KINDS: dict[Any, str] = {read_bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def selected_environment(names: Sequence[str], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the variables with these names or prefixes, for a child process that is not to get the others."""
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(prefixes)}
