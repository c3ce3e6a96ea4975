#!/usr/bin/env bash
# Starts a frontend and the workers of one engine, and ends all of them together: launch.sh ENGINE GRAPH [flags]
#
#   ENGINE  cpu, mocker, vllm, sglang or trtllm
#   GRAPH   agg            one worker
#           agg_router     two workers behind the KV router, which prefers workers that have cached the prompt's prefix
#           disagg         a decode worker and a prefill worker
#           disagg_router  two decode workers and two prefill workers behind the KV router
#
# --model sets the model; flags that this script does not define are the workers'. Environment variables:
#   DYN_HTTP_PORT          port of the frontend, 8000
#   DYN_SYSTEM_PORTn       port of the metrics and health of worker n, 8080 + n
#   CUDA_VISIBLE_DEVICESn  GPU of worker n, n - 1 (vllm, sglang and trtllm with more than one worker)
#   MODEL                  default model (vllm, sglang and trtllm)
#   KV_TRANSFER_CONFIG     vLLM's connector between prefill and decode workers
#   TRANSFER_BACKEND       SGLang's transfer between prefill and decode workers, nixl
#   PAGE_SIZE              SGLang's block size, 16
set -euo pipefail

engine=$1
graph=$2
shift 2
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$examples/_python.sh"

frontend_flags=()
case "$graph" in
    agg) roles=(aggregated) ;;
    agg_router) roles=(aggregated aggregated) frontend_flags=(--router-mode kv) ;;
    disagg) roles=(decode prefill) ;;
    disagg_router) roles=(decode decode prefill prefill) frontend_flags=(--router-mode kv) ;;
    *) echo "unknown graph $graph: expected agg, agg_router, disagg or disagg_router" >&2; exit 2 ;;
esac

model_flag=--model
case "$engine" in
    cpu) model= model_flag=--model-path default_model="the bundled demo model" ;;
    mocker) model= model_flag=--model-path default_model="random tokens of the bundled demo model" ;;
    vllm | trtllm) model=${MODEL:-Qwen/Qwen3-0.6B} default_model=$model ;;
    sglang) model=${MODEL:-Qwen/Qwen3-0.6B} default_model=$model model_flag=--model-path ;;
    *) echo "unknown engine $engine: expected cpu, mocker, vllm, sglang or trtllm" >&2; exit 2 ;;
esac

usage() {
    echo "usage: $graph.sh [--model MODEL] [--enable-otel] [flags of python -m dynamo.$engine ...]"
    echo "Without --model it serves $default_model. The frontend listens on port ${DYN_HTTP_PORT:-8000}."
}

worker_flags=()
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
if [ "$engine" = mocker ] && [ -z "$model" ]; then
    model=$("$python" -c 'import dynamo.cpu; print(dynamo.cpu.__path__[0] + "/demo_model")')
fi
model_flags=()
[ -z "$model" ] || model_flags=("$model_flag" "$model")

case "$engine" in
    vllm | sglang | trtllm)
        has_gpu=1
        export PYTHONHASHSEED=${PYTHONHASHSEED:-0}  # Equal blocks have equal hashes in all workers.
        ;;
    *) has_gpu= ;;
esac

# The processes use a discovery directory of their own, unless the environment names a directory or etcd.
own_directory=
if [ -z "${DYN_FILE_KV:-}" ] && [ -z "${ETCD_ENDPOINTS:-}" ]; then
    own_directory=$(mktemp -d)
    export DYN_FILE_KV=$own_directory
    [ -z "$has_gpu" ] || export DYN_DISCOVERY_BACKEND=file
fi

end() {
    trap - EXIT INT TERM
    kill $(jobs -p) 2>/dev/null || true  # All may have ended already.
    wait
    [ -z "$own_directory" ] || rm -rf "$own_directory"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Sets engine_flags for worker $1 with role $2.
set_role_flags() {
    local number=$1 role=$2
    engine_flags=()
    [ "$engine" != sglang ] || engine_flags+=(--page-size "${PAGE_SIZE:-16}")
    [ "$role" != aggregated ] || return 0
    case "$engine" in
        sglang)
            engine_flags+=(
                --disaggregation-bootstrap-port $((12344 + number)) --disaggregation-mode "$role"
                --disaggregation-transfer-backend "${TRANSFER_BACKEND:-nixl}"
            )
            ;;
        vllm)
            # Without a GPU, KV_TRANSFER_CONFIG also needs "kv_buffer_device":"cpu".
            local transfer='{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
            export VLLM_NIXL_SIDE_CHANNEL_PORT=$((20095 + number))
            engine_flags+=(--disaggregation-mode "$role" --kv-transfer-config "${KV_TRANSFER_CONFIG:-$transfer}")
            ;;
        *) engine_flags+=(--disaggregation-mode "$role") ;;
    esac
}

# Adds to engine_flags that a worker publishes KV events, at port $1 and for replays at the port 100 above it.
add_event_flags() {
    local ports
    ports=$(printf '"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"' "$1" $(($1 + 100)))
    case "$engine" in
        vllm) engine_flags+=(--kv-events-config "{\"enable_kv_cache_events\":true,$ports}") ;;
        sglang) engine_flags+=(--kv-events-config "{$ports}") ;;
        trtllm) engine_flags+=(--publish-kv-events) ;;  # The cpu engine and the mocker always publish events.
    esac
}

DYN_SYSTEM_PORT=-1 "$python" -m dynamo.frontend --http-port "${DYN_HTTP_PORT:-8000}" "${frontend_flags[@]}" &
events_port=20080
for index in "${!roles[@]}"; do
    number=$((index + 1)) role=${roles[index]}
    set_role_flags "$number" "$role"
    if [ ${#frontend_flags[@]} -gt 0 ] && [ "$role" != decode ]; then
        add_event_flags "$events_port"
        events_port=$((events_port + 1))
    fi
    system_port=DYN_SYSTEM_PORT$number device=CUDA_VISIBLE_DEVICES$number
    if [ -n "$has_gpu" ] && [ ${#roles[@]} -gt 1 ]; then
        export CUDA_VISIBLE_DEVICES=${!device:-$index}
    fi
    DYN_SYSTEM_PORT=${!system_port:-$((8080 + number))} \
        "$python" -m "dynamo.$engine" "${model_flags[@]}" "${engine_flags[@]}" "${worker_flags[@]}" &
done
wait -n  # Until one of the processes ends; its status is this script's.
