"""Client process that prints the gaps between the tokens of streams, in seconds, until its input ends.

python token_gaps.py PORT prints one JSON list for each input line: the gaps since the previous line
"""

import http.client
import json
import sys
import threading
import time

GAPS: list[float] = []
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 2000, "ignore_eos": True}  # fmt: skip


def stream(port: int) -> None:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY))
        response = connection.getresponse()
        last = None
        while response.readline():
            now = time.monotonic()
            if last is not None:
                GAPS.append(now - last)
            last = now
            response.readline()


threading.Thread(target=stream, args=(int(sys.argv[1]),), daemon=True).start()
for _ in sys.stdin:
    gaps, GAPS[:] = list(GAPS), []
    print(json.dumps(gaps), flush=True)
