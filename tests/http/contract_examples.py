#!/usr/bin/env python3
"""proto/openapi.yaml against itself and against proto/examples (R29, the part without a daemon).

usage: contract_examples.py <source root>

The schemas are valid 2020-12 schemas; every reference resolves; codes and statuses are those of
proto/status.c; good examples validate in both directions, mistyped and misnamed requests do not; and an
answer with a member removed, renamed or added is noticed.
"""

import copy
import json
import pathlib
import re
import sys

import jsonschema

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
import openapi  # noqa: E402
from openapi import CODES, Contract, Mismatch  # noqa: E402

SCHEMA_REFUSES = {"unknown-field", "missing-field", "wrong-type"}


def references(node):
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)


def check_document(contract, root):
    for name, schema in contract.document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        if schema.get("type") == "object":
            assert schema.get("additionalProperties") is False, name
            assert set(schema.get("required", ())) <= set(schema["properties"]), name
    for reference in references(contract.document):
        contract.resolver.resolve(reference)
    table = re.findall(
        r'\[TV_[A-Z_]+\] =\s*\{"([a-z-]+)",\s*"[^"]*",\s*(\d+)',
        (root / "proto" / "status.c").read_text(),
    )
    codes = {(int(status), name) for name, status in table if name != "ok"}
    assert codes == {(status, name) for status, names in CODES.items() for name in names}
    listed = contract.document["components"]["schemas"]["Problem"]["properties"]["code"]["enum"]
    assert {name for _, name in codes} == set(listed)
    readme = (root / "proto" / "README.md").read_text()
    for status, name in codes:
        assert f"`{name}`" in readme, f"{name} is not in proto/README.md"
    for path in contract.document["paths"]:
        assert f"{path}`" in readme, f"{path} is not in proto/README.md"


def split(path):
    head, answer = re.split(r"^--- ", path.read_text(), maxsplit=1, flags=re.M)
    comment, line, body = head.split("\n", 2)
    assert comment.startswith("# "), path
    status, answer = answer.split("\n", 1)
    method, url = line.split(" ", 1)
    return method, url, body.strip(), int(status), answer.replace("\n ", "").strip()


def mutations(value):
    """The same object with one member removed, renamed or added, at every depth of objects."""
    for name, child in value.items():
        removed = {k: v for k, v in value.items() if k != name}
        yield f"without {name}", removed
        yield f"{name} misnamed", {**removed, name + "s": child}
        if isinstance(child, dict):
            for what, changed in mutations(child):
                yield f"{name}: {what}", {**value, name: changed}
    yield "with one more", {**value, "surplus": 1}


def check_example(contract, path):
    method, url, body, status, text = split(path)
    problem = status >= 400 and not url.startswith("/readyz")
    headers = {"Content-Type": "application/problem+json" if problem else "application/json"}
    if status in (429, 503):
        headers["Retry-After"] = "1"
    if status == 201:
        headers["Location"] = "/v1/sessions/" + openapi.strict_json(text.encode())["session"]
    if problem:
        headers["X-Request-Id"] = openapi.strict_json(text.encode())["instance"]
    answer = contract.answer(method, url, status, headers, text.encode())
    code = answer["code"] if problem else None
    if method == "POST" and code != "bad-json":
        accepted = contract.accepts(method, url, openapi.strict_json(body.encode()))
        exact = re.search(r":\d+\.0\b", body) is None  # a schema takes 42.0 for an integer
        assert not accepted or code not in SCHEMA_REFUSES or not exact, f"{path}: accepted"
        assert accepted or code is not None, f"{path}: refused by the schema"
    optional = {"alternative", "pointer", "node", "session_state", "topk", "logprobs", "logits", "hidden", "shadow", "skipped"}
    optional |= {"synthetic", "typical"}
    for what, changed in mutations(copy.deepcopy(answer)):
        if what.split(": ")[-1].removeprefix("without ") in optional:
            continue
        if what == "outcome: without accepted":
            continue  # then it is the answer of a round without a tree
        try:
            contract.answer(method, url, status, headers, json.dumps(changed).encode())
        except Mismatch:
            continue
        raise AssertionError(f"{path}: answer {what} goes unnoticed")


def main():
    root = pathlib.Path(sys.argv[1])
    contract = Contract(root / "proto" / "openapi.yaml")
    check_document(contract, root)
    examples = sorted((root / "proto" / "examples").glob("*.txt"))
    assert len(examples) >= 25
    for path in examples:
        check_example(contract, path)
    print(f"{len(examples)} examples, {len(contract.routes)} routes")


if __name__ == "__main__":
    main()
