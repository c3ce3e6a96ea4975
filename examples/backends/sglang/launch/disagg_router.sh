#!/usr/bin/env bash
# Two workers for prompts, chosen by what their caches hold, and two that go on. Metrics: decode on ports 8081 and 8082,
# prefill on 8083 and 8084.
set -euo pipefail
. "$(dirname "$0")/_graph.sh"

frontend --router-mode kv
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES1:-0} half "${DYN_SYSTEM_PORT1:-8081}" 12345 decode
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES2:-1} half "${DYN_SYSTEM_PORT2:-8082}" 12346 decode
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES3:-2} half "${DYN_SYSTEM_PORT3:-8083}" 12347 prefill \
    --kv-events-config "$(events 20080)"
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES4:-3} half "${DYN_SYSTEM_PORT4:-8084}" 12348 prefill \
    --kv-events-config "$(events 20081)"
until_one_ends
