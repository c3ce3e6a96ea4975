#!/bin/sh
# Two workers behind a router that knows what their caches hold: sh examples/09_kv_routing.sh [PORT].
# The second question begins as the first one did, so it goes where that beginning is cached.
set -e
port=${1:-${DYN_HTTP_PORT:-8000}}
examples=$(cd "$(dirname "$0")" && pwd)
. "$examples/_python.sh"
prefix=$(seq -s " " 1 60)

"$python" -m dynamo.cli serve --workers 2 --router-mode kv --http-port "$port" &
server=$!
trap 'kill $server; wait $server || true' EXIT
until sleep 0.5 && kill -0 $server && curl -sf "http://localhost:$port/v1/models" | grep -q dynamo-demo; do
    kill -0 $server  # Ends the script if the server could not start.
done

for question in "one" "two"; do
    curl -sf "http://localhost:$port/v1/completions" -H 'Content-Type: application/json' \
        -d "{\"model\": \"dynamo-demo\", \"prompt\": \"$prefix $question\", \"max_tokens\": 4}" >/dev/null
    # The worker publishes which blocks it has cached; the router knows of them a moment later.
    until curl -sf "http://localhost:$port/routing/state" | grep -q '"held_blocks": *[1-9]'; do sleep 0.1; done
done
"$python" -m dynamo.cli route explain --url "http://localhost:$port"
