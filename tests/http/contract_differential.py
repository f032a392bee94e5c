#!/usr/bin/env python3
"""The decoder against the request schemas of proto/openapi.yaml (R29, the part without a daemon).

usage: contract_differential.py <source root> <decode_bodies program>

Full bodies of every call are changed in one place: every member removed, renamed or replaced by values
of every type and around every limit. Where the schema refuses, the decoder must refuse; where the
decoder finds an unknown, missing or mistyped member, the schema must refuse too; and what only the
decoder refuses must be about state that a schema cannot know: vocabulary, tree shape, context.
"""

import base64
import collections
import copy
import json
import pathlib
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
from openapi import Contract  # noqa: E402

SESSION = "s_0123456789abcdefghij-_"
SCHEMA_CODES = {"unknown-field", "missing-field", "wrong-type"}
SEMANTIC_CODES = {"wrong-value", "tree-invalid", "tree-too-large", "context-full"}
DIGEST = "00112233445566778899aabbccddeeff"
ROUND = {"seq": 1, "epoch": "0123456789abcdef", "expected_len": 3, "expected_digest": DIGEST}
COMMON = {"deadline_ms": 5, "lease_s": 5, "ack": 1}
TREE = {"tokens": [5, 6, 7], "parents": [-1, 0, 1]}
CELLS = base64.b64encode(struct.pack("<6i", 6, 9, 7, 8, -1, -1)).decode()
PROBS = base64.b64encode(struct.pack("<6f", 0.75, 0.25, 0.5, 0.5, 0.0, 0.0)).decode()
RATIO_TREE = {**TREE, "q_topk": {"shape": [3, 2], "ids_b64": CELLS, "probs_b64": PROBS}}
ROWS = base64.b64encode(struct.pack("<f", 1 / 307) * (3 * 307)).decode()
DENSE_TREE = {**TREE, "q_dense": {"shape": [3, 307], "dtype": "f32", "data_b64": ROWS}}
RATIO = {"rule": "ratio_wor", "typical": {"epsilon": 0.1, "delta": 0.5}}
SAMPLING = {
    "rule": "greedy", "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": "12",
}
WANT = {
    "top_k": 3, "rows": [0, 2], "logprobs": True, "shadow": False,
    "logits": {"rows": "all", "dtype": "bf16", "via": "inline"},
    "hidden": {"taps": [1, 0], "rows": "all", "dtype": "fp8_e4m3", "via": "inline", "project": False},
}
CREATE = {
    "sampling": SAMPLING, "stop": {"token_ids": [2, 3], "max_len": 64}, "lease_s": 60,
    "cache_salt": "salt", "expected_digest": DIGEST,
    "want": {"hidden": {"taps": [3, 1], "rows": "window:2", "dtype": "f16", "via": "inline", "project": False}},
}
BODIES = [
    ("create", "/v1/sessions", {"tokens": [1, 2, 3], **CREATE}),
    ("create", "/v1/sessions", {"tokens_b64": "AQAAAAIAAAA=", **CREATE}),
    ("create", "/v1/sessions", {"prefix": {"session": SESSION, "len": 2}, **CREATE}),
    ("verify", f"/v1/sessions/{SESSION}/verify",
     {**ROUND, "tree": TREE, "rule": "greedy", "want": WANT, **COMMON}),
    ("extend", f"/v1/sessions/{SESSION}/extend",
     {**ROUND, "tokens": [1, 2], "keep_pending": True, **COMMON}),
    ("extend", f"/v1/sessions/{SESSION}/extend", {**ROUND, "tokens_b64": "AQAAAA=="}),
    ("decode", f"/v1/sessions/{SESSION}/decode", {**ROUND, "max_tokens": 4, **COMMON}),
    ("rollback", f"/v1/sessions/{SESSION}/rollback", {**ROUND, "len": 2, "pending": 6, **COMMON}),
    ("fork", f"/v1/sessions/{SESSION}/fork", {"epoch": ROUND["epoch"], "len": 3, "seed": "12", "lease_s": 5}),
    ("renew", f"/v1/sessions/{SESSION}/renew", {"lease_s": 5}),
    ("oneshot", "/v1/verify",
     {"tokens": [1], "tree": TREE, "sampling": SAMPLING, "want": WANT, "deadline_ms": 5}),
    ("oneshot", "/v1/verify", {"tokens_b64": "", "tree": TREE}),
    ("oneshot", "/v1/verify", {"tokens": [1], "tree": RATIO_TREE, "sampling": RATIO}),
    ("verify", f"/v1/sessions/{SESSION}/verify", {**ROUND, "tree": DENSE_TREE, "rule": "ratio_wor"}),
    ("batch", "/v1/verify:batch", {"items": [{"seq": 1}, {}]}),
    ("score", "/v1/score", {"session": SESSION, "tree": TREE, "deadline_ms": 5}),
    ("score", "/v1/score", {"tokens": [1], "tree": TREE, "deadline_ms": 5}),
    ("score", "/v1/score", {"tokens_b64": "AQAAAA==", "tree": TREE}),
    ("parity", "/v1/parity", {"session": SESSION, "tree": TREE}),
    ("parity", "/v1/parity", {"tokens": [1], "tree": TREE}),
    ("parity", "/v1/parity", {}),
]
VALUES = [
    None, True, False, 0, 1, -1, 2, 16, 17, 63, 64, 65, 100, 101, 120, 306, 307, 1023, 1024, 1025, 2048,
    3600, 3601, 4096, 4097, 600000, 600001, 2**31 - 1, 2**31, 2**53 + 1, 2**64, 10**30, 0.5, -0.5, 1.5,
    1e-9, 100.5, 1e300, "", "0", "1", "-1", "01", "x", "é", "18446744073709551615", "0" * 16, "A" * 16,
    "0" * 32, "AQAAAA==", "AQAAAA", "AQ==", "greedy", "typical", "all", "path", "f16", "fp8_e4m3",
    "inline", "fetch", "s" * 64, "s" * 65, SESSION, [], [0], [-1], [1.5], [0, 1], [0, 0], ["0"], [[0]],
    list(range(16)), list(range(17)), [None], {}, {"tokens": [1]}, {"rows": "stop"}, {"max_len": 1},
    {"seed": "1"}, {"x": 1},
]


def changes(value):
    """Bodies that differ from `value` in one place."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield {k: v for k, v in value.items() if k != name}
            yield {(name.capitalize() if k == name else k): v for k, v in value.items()}
            for changed in [*VALUES, *changes(child)]:
                yield {**value, name: changed}
        yield {**value, "surplus": 1}
    elif isinstance(value, list):
        for index, child in enumerate(value):
            for changed in [*VALUES, *changes(child)]:
                yield [*value[:index], changed, *value[index + 1 :]]


def main():
    contract = Contract(pathlib.Path(sys.argv[1]) / "proto" / "openapi.yaml")
    cases = []
    for call, url, body in BODIES:
        cases.append((call, url, body))
        cases += [(call, url, changed) for changed in changes(copy.deepcopy(body))]
        cases += [(call, url, value) for value in VALUES]
    lines = "".join(f"{call} {json.dumps(body)}\n" for call, _, body in cases)
    run = subprocess.run([sys.argv[2]], input=lines, capture_output=True, text=True, check=True)
    verdicts = run.stdout.splitlines()
    assert len(verdicts) == len(cases), (len(verdicts), len(cases))
    counts = collections.Counter()
    faults = []
    for (call, url, body), verdict in zip(cases, verdicts):
        code = verdict.split(" ")[0]
        accepted = contract.accepts("POST", url, body)
        counts[code] += 1
        if not accepted and code == "ok":
            faults.append(f"only the schema refuses: {call} {json.dumps(body)}")
        elif accepted and code != "ok" and code not in SEMANTIC_CODES:
            faults.append(f"the schema accepts, {verdict}: {call} {json.dumps(body)}")
        elif accepted and code in SCHEMA_CODES:
            faults.append(f"the schema does not see {verdict}: {call} {json.dumps(body)}")
    print(f"{len(cases)} bodies:", ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
    for fault in faults[:20]:
        print(fault)
    assert not faults, f"{len(faults)} differences"
    assert counts["ok"] > 100 and all(counts[code] > 20 for code in SCHEMA_CODES)


if __name__ == "__main__":
    main()
