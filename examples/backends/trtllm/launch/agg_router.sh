#!/usr/bin/env bash
# Two workers behind the KV router. Metrics on ports 8081 and 8082.
exec "$(dirname "$0")/../../launch.sh" trtllm agg_router "$@"
