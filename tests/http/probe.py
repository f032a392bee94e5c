"""A healthy client in a process of its own, so that nobody else's work is in its times.

usage: probe.py PORT EVERY_S [TARGET]. GET /healthz on one connection: "ready" behind the first answer, and at the
end of stdin one line of JSON: every answer's seconds, how many were not 200, and when the last one came. With a target
that is asked for instead, until an answer is not 200; then /healthz once more, which has to be.
"""

import http.client
import json
import select
import sys
import time


def main():
    port, every_s = int(sys.argv[1]), float(sys.argv[2])
    target = sys.argv[3] if len(sys.argv) > 3 else None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times, failures, end_s = [], 0, None

    def ask(path):
        start = time.monotonic()
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        times.append(time.monotonic() - start)
        return answer.status == 200

    while not times or not select.select([sys.stdin], [], [], every_s)[0]:
        fine = ask(target or "/healthz")
        end_s = time.monotonic()
        if len(times) == 1:
            print("ready", flush=True)
        if target is not None and not fine:
            failures += not ask("/healthz")
            break
        failures += not fine
    connection.close()
    print(json.dumps({"times": times, "failures": failures, "end_s": end_s}))


main()
