#!/usr/bin/env bash
# One worker that computes prompts and answers: frontend on port 8000, the worker's metrics on port 8081.
set -euo pipefail
. "$(dirname "$0")/_graph.sh"

frontend
worker "${DYN_SYSTEM_PORT1:-8081}"
until_one_ends
