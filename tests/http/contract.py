"""Checks an answer against proto/openapi.yaml: path, method, status, media type, headers and schema.

Owns nothing but the reading of the contract. An answer whose status or media type the contract does not
name is a failure, as is a problem whose code and status do not belong together.
"""

import json
import os
import re

import jsonschema
import yaml

HERE = os.path.dirname(os.path.abspath(__file__))
SPEC = os.path.join(HERE, "..", "..", "proto", "openapi.yaml")


class ContractError(AssertionError):
    """The answer is not what the contract says."""


class Contract:
    def __init__(self, path=SPEC):
        with open(path, encoding="utf-8") as spec:
            self.root = yaml.safe_load(spec)
        self.resolver = jsonschema.RefResolver(base_uri="", referrer=self.root)
        self.paths = []
        for template, item in self.root["paths"].items():
            pattern = re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(template))
            self.paths.append((re.compile(pattern + r"\Z"), template, item))
        self.seen = set()

    def resolve(self, node):
        while "$ref" in node:
            _, node = self.resolver.resolve(node["$ref"])
        return node

    def item(self, path):
        """(template, path item) of a path, or (None, None)."""
        for pattern, template, item in self.paths:
            if pattern.match(path):
                return template, item
        return None, None

    def check(self, method, target, status, headers, body):
        """headers: dict with lower-case names. Raises ContractError."""
        where = f"{method} {target[:100]} -> {status}"
        request_id = headers.get("x-request-id", "")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", request_id):
            raise ContractError(f"{where}: X-Request-Id is {request_id!r}")
        template, item = self.item(target.split("?")[0])
        operation = None if item is None else item.get("get" if method == "HEAD" else method.lower())
        if operation is None:
            # no route, or not for this method: the only answers are problems
            answer = self.root["components"]["responses"]["Problem"]
            if status < 400:
                raise ContractError(f"{where}: the contract has no such operation")
        else:
            answers = operation["responses"]
            answer = answers.get(str(status))
            if answer is None and status >= 400:
                answer = answers.get("default")
            if answer is None:
                raise ContractError(f"{where}: the contract has no such status")
            self.seen.add((method, template, status))
        self._check_content(where, self.resolve(answer), method, headers, body)
        if headers.get("content-type") == "application/problem+json" and method != "HEAD":
            self._check_problem(where, status, headers, json.loads(body))

    def _check_content(self, where, answer, method, headers, body):
        content = answer.get("content")
        if content is None:
            if body or headers.get("content-type"):
                raise ContractError(f"{where}: a body where the contract has none")
            return
        media = headers.get("content-type")
        if media not in content:
            raise ContractError(f"{where}: media type {media!r} is not among {sorted(content)}")
        if method == "HEAD":
            if body:
                raise ContractError(f"{where}: an answer to HEAD has a body")
            return
        if not media.endswith("json"):
            return
        schema = content[media].get("schema", {})
        validator = jsonschema.Draft202012Validator(schema, resolver=self.resolver)
        errors = sorted(validator.iter_errors(json.loads(body)), key=lambda e: list(e.path))
        if errors:
            first = errors[0]
            at = "/".join(str(part) for part in first.absolute_path)
            raise ContractError(f"{where}: /{at}: {first.message[:300]}\n{body[:600]!r}")

    def _check_problem(self, where, status, headers, problem):
        if problem["status"] != status:
            raise ContractError(f"{where}: the body says {problem['status']}")
        if problem["instance"] != headers["x-request-id"]:
            raise ContractError(f"{where}: instance is not the request id")
        if problem["type"] != "urn:treeverify:error:" + problem["code"]:
            raise ContractError(f"{where}: type and code differ")
        if status in (429, 503) and not headers.get("retry-after", "").isdigit():
            raise ContractError(f"{where}: no Retry-After")
        if status == 405 and not headers.get("allow"):
            raise ContractError(f"{where}: no Allow")
