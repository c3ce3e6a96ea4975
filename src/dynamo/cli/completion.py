"""Shell completion: `dynamo completion bash|zsh|fish` prints a script with the words and values of all commands."""

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from dynamo.cli.commands import COMMANDS, Command
from dynamo.core.errors import ConfigError

HELP = """\
dynamo completion: completion of commands and flags

  dynamo completion bash >> ~/.bashrc                                    bash
  dynamo completion zsh > ~/.zfunc/_dynamo                               zsh, with ~/.zfunc in fpath before compinit
  dynamo completion fish > ~/.config/fish/completions/dynamo.fish        fish
"""
COMMON = ("--help", "--help-all")
GRAPHS = "graphs"
"""Word after which the names of the running graphs are printed, for the scripts."""
NAMING = ("status", "logs", "stop")
"""Commands that take the name of a graph."""
BASH = """\
# bash completion of dynamo
_dynamo() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"
    local command="${COMP_WORDS[1]}" sub="${COMP_WORDS[2]}" words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words=%(commands)s
    else
        case "$command $previous" in
%(values)s
        esac
        if [ -n "$words" ]; then
            COMPREPLY=($(compgen -W "$words" -- "$current"))
            return
        fi
        [ "$COMP_CWORD" -gt 2 ] || sub=
        case "$command $sub" in
%(cases)s
        esac
        case "$command" in
            %(naming)s) words="$words $(dynamo completion graphs 2>/dev/null)" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    case "$command $current" in
        *" -"*|"%(naming_first)s "*) ;;
        *) COMPREPLY+=($(compgen -f -- "$current")) ;;
    esac
}
complete -o filenames -F _dynamo dynamo
"""
ZSH = """\
#compdef dynamo
# zsh completion of dynamo
_dynamo() {
    local -a found
    local sub=${words[3]}
    if (( CURRENT == 2 )); then
        found=(%(commands)s)
        compadd -a found
        return
    fi
    case "${words[2]} ${words[CURRENT-1]}" in
%(values)s
    esac
    if (( $#found )); then
        compadd -a found
        return
    fi
    (( CURRENT > 3 )) || sub=
    case "${words[2]} $sub" in
%(cases)s
    esac
    case "${words[2]}" in
        %(naming)s) found+=(${(f)"$(dynamo completion graphs 2>/dev/null)"}); compadd -a found; return ;;
    esac
    compadd -a found
    _files
}
if [ "$funcstack[1]" = _dynamo ]; then _dynamo "$@"; else compdef _dynamo dynamo; fi
"""
FISH = """\
# fish completion of dynamo
function __dynamo_at
    set -l words (commandline -opc)
    test "$words[2]" = "$argv[1]"; and test -z "$argv[2]" -o "$words[3]" = "$argv[2]"
end
complete -c dynamo -n __fish_use_subcommand -f -a '%(commands)s'
"""


def completion(argv: Sequence[str]) -> int:
    """Run `dynamo completion`. Raise `ConfigError` for another shell."""
    if not argv or argv[0] in {"-h", "--help", "--help-all"}:
        print(HELP, end="")
        return 0
    if list(argv) == [GRAPHS]:
        from dynamo.ops.graphs import find_graphs

        print("\n".join(dict.fromkeys(one.record.name for one in find_graphs() if one.is_running)))
        return 0
    write = SHELLS.get(argv[0])
    if write is None or len(argv) > 1:
        raise ConfigError(f"dynamo completion {' '.join(argv)}: expected one of {', '.join(SHELLS)}")
    print(write(words_of_commands(), values_of_commands()), end="")
    return 0


def words_of_commands() -> dict[tuple[str, str], list[str]]:
    """Return the words that may follow each command and each of its subcommands."""
    found: dict[tuple[str, str], list[str]] = {}
    for command in COMMANDS.values():
        subcommands = [word for word in command.options if word]
        own = flags_of(command, "")
        found[command.word, ""] = [*subcommands, *own]
        for word in subcommands:
            found[command.word, word] = flags_of(command, word)
    return found


def values_of_commands() -> dict[tuple[str, str], list[str]]:
    """Return the values of each flag of each command that accepts only these."""
    found: dict[tuple[str, str], list[str]] = {}
    for command in COMMANDS.values():
        for subcommand in command.options:
            for metadata in options_of(command, subcommand):
                if metadata["choices"] and metadata["flag"].startswith("--"):
                    known = found.setdefault((command.word, metadata["flag"]), [])
                    known += [str(one) for one in metadata["choices"] if str(one) not in known]
    return found


def flags_of(command: Command, subcommand: str) -> list[str]:
    """Return the flags of a command, sorted."""
    flags = {metadata["flag"] for metadata in options_of(command, subcommand)}
    return sorted({*COMMON, *(one for one in flags if one.startswith("--"))})


def options_of(command: Command, subcommand: str) -> Iterator[Mapping[str, Any]]:
    """Yield the declarations of the options of a command."""
    for place in command.options.get(subcommand, ()):
        module, _, name = place.partition(":")
        for field in dataclasses.fields(getattr(import_module(module), name)):
            if "flag" in field.metadata:
                yield field.metadata


Words = Mapping[tuple[str, str], Sequence[str]]


def bash(words: Words, values: Words) -> str:
    """Return the script for bash."""

    def assign(text: str) -> str:
        return f"words={shlex.quote(text)}"

    return BASH % {
        "commands": shlex.quote(" ".join(COMMANDS)),
        "cases": _cases(words, assign),
        "values": _exact_cases(values, assign),
        "naming": "|".join(NAMING),
        "naming_first": ' "*|"'.join(NAMING),
    }


def zsh(words: Words, values: Words) -> str:
    """Return the script for zsh."""

    def assign(text: str) -> str:
        return f"found=({text})"

    return ZSH % {
        "commands": " ".join(COMMANDS),
        "cases": _cases(words, assign),
        "values": _exact_cases(values, assign),
        "naming": "|".join(NAMING),
    }


def fish(words: Words, values: Words) -> str:
    """Return the script for fish."""
    lines = [FISH % {"commands": " ".join(COMMANDS)}]
    lines += [f"complete -c dynamo -n '__dynamo_at {one}' -f -a '(dynamo completion {GRAPHS})'\n" for one in NAMING]
    for (command, subcommand), found in words.items():
        at = f"__dynamo_at {command} {subcommand}".rstrip()
        if others := [sub for name, sub in words if name == command and sub and not subcommand]:
            at += f"; and not contains -- (commandline -opc)[3] {' '.join(others)}"
        for word in found:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            if choices := values.get((command, word)):
                what += f" -x -a {shlex.quote(' '.join(choices))}"
            lines.append(f"complete -c dynamo -n {shlex.quote(at)} {what}\n")
    return "".join(lines)


def _cases(words: Words, assign: Callable[[str], str]) -> str:
    """Return the branches of a `case`: those of subcommands before those of their commands."""
    ordered = sorted(words.items(), key=lambda one: (one[0][0], not one[0][1], one[0][1]))
    lines = []
    for (command, subcommand), found in ordered:
        pattern = f'"{command} {subcommand}"' if subcommand else f'"{command} "*'
        lines.append(f"            {pattern}) {assign(' '.join(found))} ;;")
    return "\n".join(lines)


def _exact_cases(values: Words, assign: Callable[[str], str]) -> str:
    """Return the branches of a `case` over a command and the word before the cursor."""
    return "\n".join(
        f'            "{command} {flag}") {assign(" ".join(found))} ;;'
        for (command, flag), found in sorted(values.items())
    )


SHELLS: Mapping[str, Callable[[Words, Words], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
