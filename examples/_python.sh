# Sets $python, the interpreter of the examples: $PYTHON where it is set, else that of an active environment, else that of
# this clone's .venv (made by `make serve`), else python3. Sourced by sh or bash with $examples set to this directory.

_has_dynamo() {
    "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("dynamo") is None)' 2>/dev/null
}

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in "${VIRTUAL_ENV:-/none}/bin/python" "$examples/../.venv/bin/python" python3; do
        if _has_dynamo "$candidate"; then
            python=$candidate
            break
        fi
    done
fi
if ! _has_dynamo "$python"; then
    echo "error: ${PYTHON:-python3} cannot import dynamo: run \`make serve\` once, or set PYTHON to an interpreter that can" >&2
    exit 1
fi
