#!/usr/bin/env bash
# Two decode and two prefill workers behind the KV router. Metrics: decode on ports 8081 and 8082, prefill on 8083 and 8084.
exec "$(dirname "$0")/../../launch.sh" vllm disagg_router "$@"
