"""A healthy client in a process of its own, so that nobody else's work is in its times.

usage: probe.py PORT EVERY_S. GET /healthz on one connection: "ready" behind the first answer, and at the
end of stdin one line of JSON: every answer's seconds, and how many were not 200.
"""

import http.client
import json
import select
import sys
import time


def main():
    port, every_s = int(sys.argv[1]), float(sys.argv[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times, failures = [], 0
    while not times or not select.select([sys.stdin], [], [], every_s)[0]:
        start = time.monotonic()
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        answer.read()
        times.append(time.monotonic() - start)
        failures += answer.status != 200
        if len(times) == 1:
            print("ready", flush=True)
    connection.close()
    print(json.dumps({"times": times, "failures": failures}))


main()
