#!/usr/bin/env bash
# What `dynamo serve` does, by hand: a frontend and two workers that find each other in a directory.
# On several machines: the same commands, with DYN_FILE_KV on a directory that they share.
set -euo pipefail

export DYN_FILE_KV=${DYN_FILE_KV:-$(mktemp -d)} DYN_DISCOVERY_BACKEND=file
examples=$(cd "$(dirname "$0")" && pwd)
. "$examples/_python.sh"
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT  # They may have ended by themselves.

"$python" -m dynamo.cpu --model-name demo --threads 1 &
"$python" -m dynamo.cpu --model-name demo --threads 1 &
"$python" -m dynamo.frontend --http-port "${PORT:-${DYN_HTTP_PORT:-8000}}" --router-mode least-loaded &
wait
