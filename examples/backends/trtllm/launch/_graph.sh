# What the four scripts share: reading their options, starting processes, and ending all of them whatever happens.
# Sourced, not run.

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
. "$examples/_python.sh"
model=${MODEL:-Qwen/Qwen3-0.6B}
worker_flags=()  # Flags that the script does not know are the worker's.

usage() {
    echo "usage: $(basename "$0") [--model MODEL] [--enable-otel] [flags of python -m dynamo.trtllm ...]"
    echo "Without a model it serves $model. The frontend listens on port ${DYN_HTTP_PORT:-8000}."
}

while [ $# -gt 0 ]; do
    case "$1" in
        --model | --model-path)
            [ $# -ge 2 ] || { echo "$1: a directory or a hub id is missing" >&2; exit 2; }
            model=$2
            shift 2
            ;;
        --model=* | --model-path=*) model=${1#*=}; shift ;;
        --enable-otel) export OTEL_EXPORT_ENABLED=1; shift ;;
        -h | --help) usage; exit 0 ;;
        *) worker_flags+=("$1"); shift ;;
    esac
done

# The processes find each other in a directory of their own, unless one is named.
own_directory=
if [ -z "${DYN_FILE_KV:-}" ] && [ -z "${ETCD_ENDPOINTS:-}" ]; then
    own_directory=$(mktemp -d)
    export DYN_FILE_KV=$own_directory DYN_DISCOVERY_BACKEND=file
fi
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}  # Workers name equal blocks alike.

end() {
    trap - EXIT INT TERM
    kill $(jobs -p) 2>/dev/null
    wait
    [ -z "$own_directory" ] || rm -rf "$own_directory"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

frontend() {
    DYN_SYSTEM_PORT=-1 "$python" -m dynamo.frontend --http-port "${DYN_HTTP_PORT:-8000}" "$@" &
}

# The first argument is the worker's system port: metrics and health.
worker() {
    DYN_SYSTEM_PORT=$1 "$python" -m dynamo.trtllm --model "$model" "${@:2}" "${worker_flags[@]}" &
}

# The graph lives until one of its processes ends, and ends as that one did.
until_one_ends() {
    wait -n
}
