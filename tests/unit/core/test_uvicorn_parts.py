"""uvicorn is imported without its command line, which works as usual if something imports it later."""

import subprocess
import sys

COMMAND_LINE = ("click", "multiprocessing", "uvicorn.main", "uvicorn.supervisors")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_server_parts_load_no_command_line() -> None:
    code = f"import sys, dynamo.core.uvicorn_parts as p; print(p.Config, [n for n in {COMMAND_LINE!r} if n in sys.modules])"
    assert run(code) == "<class 'uvicorn.config.Config'> []"


def test_command_line_of_uvicorn_is_complete_when_it_is_used_after_the_parts() -> None:
    code = "import dynamo.core.uvicorn_parts, uvicorn; print(uvicorn.Server.__name__, uvicorn.run.__name__, uvicorn.main.name)"
    assert run(code) == "Server run main"
    code = "import dynamo.core.uvicorn_parts; from uvicorn.main import Server, main; import uvicorn; print(uvicorn.Server is Server)"
    assert run(code) == "True"


def test_unknown_name_of_uvicorn_is_an_attribute_error() -> None:
    assert run("import dynamo.core.uvicorn_parts, uvicorn; print(hasattr(uvicorn, 'Nothing'))") == "False"


def test_uvicorn_that_is_already_imported_stays_as_it_is() -> None:
    code = "import uvicorn; before = uvicorn.Server; import dynamo.core.uvicorn_parts; print(uvicorn.Server is before, '__getattr__' in vars(uvicorn))"
    assert run(code) == "True False"
