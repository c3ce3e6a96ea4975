#!/usr/bin/env bash
# Two workers for prompts, chosen by what their caches hold, and two that go on. Metrics: decode on ports 8081 and 8082,
# prefill on 8083 and 8084.
set -euo pipefail
. "$(dirname "$0")/_graph.sh"

frontend --router-mode kv
worker "${DYN_SYSTEM_PORT1:-8081}" --disaggregation-mode decode
worker "${DYN_SYSTEM_PORT2:-8082}" --disaggregation-mode decode
worker "${DYN_SYSTEM_PORT3:-8083}" --disaggregation-mode prefill
worker "${DYN_SYSTEM_PORT4:-8084}" --disaggregation-mode prefill
until_one_ends
