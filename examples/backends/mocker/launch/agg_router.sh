#!/usr/bin/env bash
# Two workers behind the KV router: a prompt goes to who has its beginning in the cache. Metrics on ports 8081 and 8082.
set -euo pipefail
. "$(dirname "$0")/_graph.sh"

frontend --router-mode kv
worker "${DYN_SYSTEM_PORT1:-8081}"
worker "${DYN_SYSTEM_PORT2:-8082}"
until_one_ends
