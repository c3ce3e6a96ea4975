"""Command lines of containers: what they run, their options, and options added so that a shell passes each word unchanged.

Kubernetes replaces `$(NAME)` in a command by the variable's value before anything runs. A word that moves from the
argument list into a shell script is quoted, and its references become expansions by the shell within double quotes, so
that a value with spaces or quotes remains one word.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import TypeAlias

from dynamo.protocols.kubernetes.common import KubeObject

SHELLS = frozenset({"sh", "bash", "dash", "ash"})
DEFAULT_COMMAND = ("/bin/sh", "-c")
"""Command of a container that has arguments only."""
REFERENCE = re.compile(r"\$\$|\$\((?P<name>[^)]*)\)|\$\(")
VARIABLE = re.compile(r"\$(?:\((\w+)\)|\{(\w+)\}|(\w+))")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
MODULE = r"(?<![\w./-])(?:[\w./-]*/)?python[0-9.]*\s(?:\\\n|[^|&;\n])*?-m\s+[\w.]*{name}[\w.]*"
"""Start of a Python program in a script, up to the name of its module."""


@dataclass(frozen=True, slots=True)
class ShellExpression:
    """Text that a shell evaluates, such as an arithmetic expression."""

    text: str


OptionWord: TypeAlias = str | ShellExpression
"""Word of an added option: plain text that needs no quotes, or what only a shell evaluates."""


@dataclass(frozen=True)
class CommandLine:
    """Command and arguments of a container."""

    words: tuple[str, ...]
    command_length: int
    """Words that belong to `command`; the others are `args`."""
    variables: Mapping[str, str | None]
    """Environment variables of the container; None for one whose value is not in the template."""

    @classmethod
    def of(cls, container: Mapping[str, object]) -> "CommandLine":
        """Return the command line of a container; it is empty when the image determines it."""
        command, args = _strings(container.get("command")), _strings(container.get("args"))
        if args and not command:
            command = DEFAULT_COMMAND
        env = container.get("env")
        entries: Iterable[Mapping[str, object]] = env if isinstance(env, list) else ()
        variables = {str(one["name"]): one.get("value") for one in entries}
        known = {name: value if isinstance(value, str) else None for name, value in variables.items()}
        return cls((*command, *args), len(command), known)

    @cached_property
    def script_index(self) -> int | None:
        """Position of the script that a shell runs; None for a program with its arguments."""
        if not self.words or self.words[0].rpartition("/")[2] not in SHELLS:
            return None
        runs_text = is_value = False
        for index, word in enumerate(self.words[1:], 1):
            if is_value:
                is_value = False
            elif word == "--":
                return index + 1 if runs_text and index + 1 < len(self.words) else None
            elif re.fullmatch(r"[-+][A-Za-z]+", word):
                runs_text |= word[0] == "-" and "c" in word
                is_value = word.endswith("o")  # set -o NAME
            else:
                return index if runs_text else None
        return None

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Words of the program, those of a script as a shell would split them."""
        if self.script_index is None:
            return self.words
        text = self.words[self.script_index].replace("\\\n", " ")
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = ""
        try:
            return tuple(lexer)
        except ValueError:  # The script's quotes are not closed, as in a here-document with an apostrophe.
            return tuple(text.split())

    def has(self, *names: str) -> bool:
        """Return whether one of the spellings of an option is given."""
        return any(_option_name(token) in names for token in self.tokens)

    def value(self, *names: str) -> str | None:
        """Return the value of an option, the last one when it is repeated."""
        found = None
        for token, following in zip_longest(self.tokens, self.tokens[1:]):
            if _option_name(token) in names:
                found = token.partition("=")[2] if "=" in token else following
        return None if found is None else self._resolved(found)

    def number(self, *names: str) -> int:
        """Return the value of an option that counts something; 1 when it is absent or not a positive number."""
        given = self.value(*names) or ""
        return max(int(given), 1) if given.isascii() and given.isdigit() else 1

    def with_options(self, options: Sequence[OptionWord], module: str) -> "CommandLine":
        """Return the command line with options of a Python module.

        In a script they follow the module's name, and a script that does not run the module is returned unchanged. They
        follow the arguments of a program, which a shell starts when an option requires it.
        """
        text = " ".join(_text(one) for one in options)
        if not self.words or not options:
            return self
        if self.script_index is not None:
            pattern = MODULE.format(name=re.escape(module))
            return self.with_script(re.sub(pattern, lambda found: f"{found[0]} {text}", self._script))
        if any(isinstance(one, ShellExpression) for one in options):
            return self._in_shell(f"exec {self.quoted()} {text}", "sh")
        return replace(self, words=(*self.words, *map(str, options)))

    def runs(self, module: str) -> bool:
        """Return whether options of a module can be added."""
        if self.script_index is None:
            return bool(self.words)
        return re.search(MODULE.format(name=re.escape(module)), self._script) is not None

    def after(self, preparation: str) -> "CommandLine":
        """Return a command line that runs a shell command first and ends when that fails."""
        if self.script_index is None:
            return self._in_shell(f"{preparation} && exec {self.quoted()}", "/bin/sh")
        return self.with_script(f"{preparation} || exit 1\n{self._script}")

    def quoted(self) -> str:
        """Return the words as a shell command that passes each one unchanged."""
        return " ".join(quoted_word(word, self.variables) for word in self.words)

    def with_script(self, script: str) -> "CommandLine":
        """Return the command line with another script for its shell."""
        index = self.script_index
        assert index is not None
        return replace(self, words=(*self.words[:index], script, *self.words[index + 1 :]))

    def started_by(self, launcher: str, module: str) -> str:
        """Return a shell command that runs this one, with a launcher in front of the Python module."""
        if self.script_index is None:
            return f"{launcher} {self.quoted()}"
        pattern = MODULE.format(name=re.escape(module))
        script, count = re.subn(pattern, lambda found: f"{launcher} {found[0]}", self._script)
        inner = self.with_script(script)
        return inner.quoted() if count else f"{launcher} {inner.quoted()}"

    def with_words(self, words: Sequence[str]) -> "CommandLine":
        """Return the command line with other words in the places of its own."""
        return replace(self, words=tuple(words))

    def write_to(self, container: KubeObject) -> None:
        """Set command and arguments of a container."""
        for name, words in (
            ("command", self.words[: self.command_length]),
            ("args", self.words[self.command_length :]),
        ):
            if words:
                container[name] = list(words)
            else:
                container.pop(name, None)

    @property
    def _script(self) -> str:
        assert self.script_index is not None
        return self.words[self.script_index]

    def _in_shell(self, script: str, shell: str) -> "CommandLine":
        return replace(self, words=(shell, "-c", script), command_length=2)

    def _resolved(self, text: str) -> str:
        found = VARIABLE.fullmatch(text)
        value = self.variables.get(next(filter(None, found.groups()), "")) if found else None
        return text if value is None else value


def shell_script(script: str, variables: Mapping[str, str | None]) -> CommandLine:
    """Return a command line that runs a script."""
    return CommandLine((*DEFAULT_COMMAND, script), len(DEFAULT_COMMAND), variables)


def quoted_word(word: str, variables: Mapping[str, str | None]) -> str:
    """Return a word for a shell script, with the meaning that it has as an argument in a pod template.

    A reference to one of the container's variables becomes an expansion by the shell. Other references remain for
    Kubernetes; one without an end is escaped, so that it does not extend to the words that follow.
    """
    parts, literal, start = [], "", 0
    for found in REFERENCE.finditer(word):
        literal += word[start : found.start()]
        start, name = found.end(), found["name"]
        if name in variables and IDENTIFIER.fullmatch(name):
            parts += [shlex.quote(literal)] if literal else []
            parts.append(f'"${{{name}}}"')
            literal = ""
        else:
            literal += "$$(" if found[0] == "$(" else found[0]
    literal += word[start:]
    if literal or not parts:
        parts.append(shlex.quote(literal))
    return "".join(parts)


def _text(option: OptionWord) -> str:
    return option.text if isinstance(option, ShellExpression) else option


def _option_name(token: str) -> str:
    name = token.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _strings(value: object) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list | tuple) else ()
