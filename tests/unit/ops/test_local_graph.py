"""Local graph: processes by their command lines, versions by their environments, logs of `dynamo serve`."""

from pathlib import Path

from dynamo.ops.local_graph import LocalProcess, local_processes, logs_in, module_of, serve_directories, version_of


def test_module_is_that_of_a_process_of_a_graph() -> None:
    assert module_of(["python", "-P", "-m", "dynamo.cpu", "--x"]) == "dynamo.cpu"
    assert module_of(["python", "-m", "dynamo.cli", "serve"]) == ""
    assert module_of(["python", "-m", "http.server"]) == ""
    assert module_of(["dynamo.cpu"]) == ""


def test_processes_are_found_by_their_command_lines(tmp_path: Path) -> None:
    for pid, words in (("7", "python\0-m\0dynamo.frontend\0"), ("8", "bash\0"), ("self", "x\0")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_text(words)
    (tmp_path / "9").mkdir()
    assert local_processes(str(tmp_path)) == [LocalProcess(7, "dynamo.frontend", ("python", "-m", "dynamo.frontend"))]
    assert local_processes(str(tmp_path / "absent")) == []


def test_version_is_that_of_the_environment_of_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "lib" / "python3.11" / "site-packages" / "ai_dynamo-1.6.0.dist-info").mkdir(parents=True)
    assert version_of((str(tmp_path / "bin" / "python"), "-m", "dynamo.vllm")) == ("ai-dynamo", "1.6.0")
    assert version_of(("/nowhere/bin/python",)) == ("", "")


def test_directories_and_logs_of_serve_are_found(tmp_path: Path) -> None:
    logs = tmp_path / "dynamo-serve-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.log").write_text("line\n")
    (tmp_path / "other").mkdir()
    (found,) = serve_directories(str(tmp_path))
    assert logs_in(found) == {"worker-1.log": "line\n"}
