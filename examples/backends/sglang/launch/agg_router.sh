#!/usr/bin/env bash
# Two workers behind the KV router: a prompt goes to who has its beginning in the cache. Metrics on ports 8081 and 8082.
set -euo pipefail
. "$(dirname "$0")/_graph.sh"

frontend --router-mode kv
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES1:-0} worker "${DYN_SYSTEM_PORT1:-8081}" --kv-events-config "$(events 20080)"
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES2:-1} worker "${DYN_SYSTEM_PORT2:-8082}" --kv-events-config "$(events 20081)"
until_one_ends
