#!/usr/bin/env bash
# One worker: frontend on port 8000, the worker's metrics on port 8081.
exec "$(dirname "$0")/../../launch.sh" vllm agg "$@"
