"""Command lines of containers: options found and added, words quoted."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kubelet import programs

from dynamo.operator.reconcile.multinode.commands import CommandLine, ShellExpression, quoted_word

PYTHON = ["python3", "-m", "dynamo.vllm"]
RANK = ShellExpression("$((INDEX + 1))")


def line(command: list[str], args: list[str], env: dict[str, str] | None = None) -> CommandLine:
    return CommandLine.of(
        {"command": command, "args": args, "env": [{"name": name, "value": one} for name, one in (env or {}).items()]}
    )


def written(command: CommandLine) -> dict[str, list[str]]:
    container: dict[str, list[str]] = {}
    command.write_to(container)
    return container


def test_options_follow_arguments_of_a_program() -> None:
    found = line(PYTHON, ["--model", "m"]).with_options(["--nnodes", "2"], "vllm")
    assert written(found) == {"command": PYTHON, "args": ["--model", "m", "--nnodes", "2"]}


def test_option_with_shell_expansion_runs_the_program_in_a_shell() -> None:
    found = line(PYTHON, ["--model", "a b"]).with_options(["--node-rank", RANK], "vllm")
    script = "exec python3 -m dynamo.vllm --model 'a b' --node-rank $((INDEX + 1))"
    assert written(found) == {"command": ["sh", "-c"], "args": [script]}


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (["/bin/sh", "-c"], ["python3 -m dynamo.vllm --model m; echo done"]),
        ([], ["python3 -m dynamo.vllm --model m; echo done"]),
        (["bash", "-o", "pipefail", "-ec", "python3 -m dynamo.vllm --model m; echo done"], []),
    ],
)
def test_options_follow_the_module_within_a_script(command: list[str], args: list[str]) -> None:
    found = line(command, args).with_options(["--node-rank", RANK], "vllm")
    assert found.words[-1] == "python3 -m dynamo.vllm --node-rank $((INDEX + 1)) --model m; echo done"


def test_every_run_of_the_module_in_a_script_receives_the_options() -> None:
    script = 'if x; then exec /opt/bin/python3.12 -u -m dynamo.vllm a; else python \\\n -m dynamo.vllm.main "b"; fi'
    found = line(["sh", "-c"], [script]).with_options(["--headless"], "vllm")
    assert found.words[-1] == (
        "if x; then exec /opt/bin/python3.12 -u -m dynamo.vllm --headless a; "
        'else python \\\n -m dynamo.vllm.main --headless "b"; fi'
    )


@pytest.mark.parametrize("script", ["/opt/run.sh --model m", "python3 -m dynamo.frontend | cat vllm", "vllm serve m"])
def test_script_that_does_not_run_the_module_is_unchanged(script: str) -> None:
    command = line(["sh", "-c"], [script])
    assert not command.runs("vllm")
    assert command.with_options(["--headless"], "vllm") == command


def test_container_without_command_is_unchanged() -> None:
    command = line([], [])
    assert not command.runs("vllm")
    assert written(command.with_options(["--headless"], "vllm")) == {}


def test_container_with_arguments_only_runs_them_in_a_shell() -> None:
    assert written(line([], ["python3 -m dynamo.vllm"])) == {
        "command": ["/bin/sh", "-c"],
        "args": ["python3 -m dynamo.vllm"],
    }


@pytest.mark.parametrize(
    "args",
    [
        ["--tensor-parallel-size", "16"],
        ["--tensor-parallel-size=16"],
        ["--tensor_parallel_size", "16"],
        ["-tp", "4", "-tp", "16"],
        ["-tp", "$(TP)"],
    ],
)
def test_number_is_found_in_every_spelling(args: list[str]) -> None:
    assert line(PYTHON, args, {"TP": "16"}).number("--tensor-parallel-size", "-tp") == 16


@pytest.mark.parametrize(
    "script",
    ["python3 -m dynamo.vllm \\\n  -tp 16;", "exec python3 -m dynamo.vllm -tp=$TP && true", "# don't\npython3 -tp 16"],
)
def test_number_is_found_in_a_script(script: str) -> None:
    assert line(["sh", "-c"], [script], {"TP": "16"}).number("-tp") == 16


def test_number_is_one_when_absent_or_not_a_number() -> None:
    assert line(PYTHON, []).number("-tp") == 1
    assert line(PYTHON, ["-tp", "many"]).number("-tp") == 1
    assert line(PYTHON, ["-tp"]).number("-tp") == 1


def test_shell_command_before_a_program_or_a_script() -> None:
    assert line(PYTHON, ["a b"]).after("ray start").words == (
        "/bin/sh",
        "-c",
        "ray start && exec python3 -m dynamo.vllm 'a b'",
    )
    assert line(["bash", "-c"], ["set -x\nrun"]).after("ray start").words[-1] == "ray start || exit 1\nset -x\nrun"


def test_launcher_is_placed_before_the_module() -> None:
    assert line(PYTHON, ["a b"]).started_by("launch", "vllm") == "launch python3 -m dynamo.vllm 'a b'"
    script = line(["sh", "-c"], ["cd x && python3 -m dynamo.vllm"]).started_by("launch", "vllm")
    assert script == "sh -c 'cd x && launch python3 -m dynamo.vllm'"
    assert line(["sh", "-c"], ["./run"]).started_by("launch", "vllm") == "launch sh -c ./run"


def test_references_are_quoted_for_kubernetes_or_shell_expansion() -> None:
    assert quoted_word("$(MODEL)/x y", {"MODEL": None}) == "\"${MODEL}\"'/x y'"
    assert quoted_word("$(LWS_WORKER_INDEX)", {}) == "'$(LWS_WORKER_INDEX)'"
    assert quoted_word("$$(MODEL)", {"MODEL": None}) == "'$$(MODEL)'"
    assert quoted_word("$(MODEL", {"MODEL": None}) == "'$$(MODEL'"
    assert quoted_word("", {}) == "''"


WORD = st.text(alphabet="ab $(){}'\"\\;|&<>*?!#~`=-\n,:é") | st.sampled_from(
    ["$(MODEL)", "x=$(MODEL) y", "$$(MODEL)", "$(MODEL", "$(NONE)", '{"a": "b c"}', "--flag=it's", "$(INDEX)"]
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORD, max_size=9), model=st.text(alphabet="ab '\"$\\;&()", max_size=8))
def test_program_in_a_shell_receives_the_same_arguments(words: list[str], model: str, tmp_path: Path) -> None:
    container = {
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": words,
        "env": [{"name": "MODEL", "value": model}],
    }
    variables = {"INDEX": "4"}  # Of the provider: not in the template.
    direct = programs(container, tmp_path, variables=variables, names=("python3",))
    CommandLine.of(container).with_options(["--address", "$(INDEX).x", "--rank", RANK], "vllm").write_to(container)
    assert container["command"] == ["sh", "-c"]
    through_shell = programs(container, tmp_path, variables=variables, names=("python3",))
    assert through_shell == [[*direct[0], "--address", "4.x", "--rank", "5"]]
