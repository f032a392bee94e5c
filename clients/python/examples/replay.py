"""Run the reproducer of a parity violation again: does this server still disagree with its oracle?

    python replay.py FILE [--url URL]      # a body that GET /v1/parity/violations/{n} gave, or violation-*.json

Exit 0: fast path and oracle agree; 1: they differ, and the numbers are printed. A violation of kind "kernel" is a .kdtr
file, for test_verify_attn.
"""

import argparse
import json
import sys

from treeverify import Client


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--url", default="http://127.0.0.1:8471")
    options = parser.parse_args()
    with open(options.file, encoding="ascii") as file:
        body = json.load(file)
    with Client(options.url, timeout_s=600) as client:
        report = client.request("POST", "/v1/parity", body)
    print(json.dumps(report, indent=1))
    print("agree" if report["ok"] else "DISAGREE")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
