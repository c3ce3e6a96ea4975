#!/usr/bin/env bash
# A decode worker and a prefill worker. Metrics: decode on port 8081, prefill on port 8082.
exec "$(dirname "$0")/../../launch.sh" sglang disagg "$@"
