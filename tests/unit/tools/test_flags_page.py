"""docs/reference/flags.md names every flag and variable of every command."""

from dataclasses import dataclass

from tools import flags_page

from dynamo.core.config import option


def test_every_flag_and_its_variable_are_in_the_page() -> None:
    text = flags_page.content()
    declared = [one for config in flags_page.configurations().values() for _, one in flags_page.options(config)]
    assert len(declared) > 400
    words = [word for one in declared for word in (one.metadata["flag"], one.metadata["env"]) if word]
    assert [word for word in words if f"`{word}`" not in text] == []


def test_line_shows_names_default_and_choices() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Example:
        """Example of a command: one flag."""

        mode: str = option("fast", "--mode", "DYN_MODE", "Mode | speed", aliases=("--speed",), choices=("fast", "slow"))
        names: list[str] = option(["a", "b"], "--names", None, "Names")

    (owner, mode), (_, names) = flags_page.options(Example)
    assert flags_page.title(owner) == "Example of a command"
    assert flags_page.line(mode) == ("`--mode`, `--speed`", "`DYN_MODE`", "`fast`", "Mode \\| speed (fast, slow)")
    assert flags_page.line(names)[2] == "`a,b`"
