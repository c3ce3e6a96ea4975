#!/usr/bin/env bash
# A worker that computes prompts and one that goes on from them. Metrics: decode on port 8081, prefill on 8082.
set -euo pipefail
. "$(dirname "$0")/_graph.sh"

frontend
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES1:-0} worker "${DYN_SYSTEM_PORT1:-8081}" --disaggregation-mode decode
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES2:-1} worker "${DYN_SYSTEM_PORT2:-8082}" --disaggregation-mode prefill
until_one_ends
