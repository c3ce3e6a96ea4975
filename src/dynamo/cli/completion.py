"""Shell completion: `dynamo completion bash|zsh|fish` prints a script with the words of all commands."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from dynamo.cli.commands import COMMANDS, Command
from dynamo.core.errors import ConfigError

HELP = """\
dynamo completion: completion of commands and flags

  dynamo completion bash >> ~/.bashrc                                    bash
  dynamo completion zsh > ~/.zfunc/_dynamo                               zsh, with ~/.zfunc in fpath before compinit
  dynamo completion fish > ~/.config/fish/completions/dynamo.fish        fish
"""
COMMON = ("--help", "--help-all")
BASH = """\
# bash completion of dynamo
_dynamo() {
    local current="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" sub="${COMP_WORDS[2]}" words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words=%(commands)s
    else
        [ "$COMP_CWORD" -gt 2 ] || sub=
        case "$command $sub" in
%(cases)s
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    case "$current" in -*) ;; *) COMPREPLY+=($(compgen -f -- "$current")) ;; esac
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
    (( CURRENT > 3 )) || sub=
    case "${words[2]} $sub" in
%(cases)s
    esac
    compadd -a found
    _files
}
if [ "$funcstack[1]" = _dynamo ]; then _dynamo "$@"; else compdef _dynamo dynamo; fi
"""


def completion(argv: Sequence[str]) -> int:
    """Run `dynamo completion`. Raise `ConfigError` for another shell."""
    if not argv or argv[0] in {"-h", "--help", "--help-all"}:
        print(HELP, end="")
        return 0
    write = SHELLS.get(argv[0])
    if write is None or len(argv) > 1:
        raise ConfigError(f"dynamo completion {' '.join(argv)}: expected one of {', '.join(SHELLS)}")
    print(write(words_of_commands()), end="")
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


def flags_of(command: Command, subcommand: str) -> list[str]:
    """Return the flags of a command, sorted."""
    flags = set(COMMON)
    for place in command.options.get(subcommand, ()):
        module, _, name = place.partition(":")
        for field in dataclasses.fields(getattr(import_module(module), name)):
            flag = field.metadata.get("flag", "")
            if flag.startswith("--"):
                flags.add(flag)
    return sorted(flags)


def bash(words: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Return the script for bash."""
    return BASH % {
        "commands": shlex.quote(" ".join(COMMANDS)),
        "cases": _cases(words, lambda one: f"words={shlex.quote(one)}"),
    }


def zsh(words: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Return the script for zsh."""
    return ZSH % {"commands": " ".join(COMMANDS), "cases": _cases(words, lambda one: f"found=({one})")}


def fish(words: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Return the script for fish."""
    lines = [
        "# fish completion of dynamo",
        f"complete -c dynamo -n __fish_use_subcommand -f -a {shlex.quote(' '.join(COMMANDS))}",
    ]
    for (command, subcommand), found in words.items():
        seen = f"__fish_seen_subcommand_from {command}"
        if subcommand:
            seen += f"; and __fish_seen_subcommand_from {subcommand}"
        for word in found:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c dynamo -n {shlex.quote(seen)} {what}")
    return "\n".join(lines) + "\n"


def _cases(words: Mapping[tuple[str, str], Sequence[str]], assign: Callable[[str], str]) -> str:
    """Return the branches of a `case`: those of subcommands before those of their commands."""
    ordered = sorted(words.items(), key=lambda one: (one[0][0], not one[0][1], one[0][1]))
    lines = []
    for (command, subcommand), found in ordered:
        pattern = f'"{command} {subcommand}"' if subcommand else f'"{command} "*'
        lines.append(f"            {pattern}) {assign(' '.join(found))} ;;")
    return "\n".join(lines)


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
