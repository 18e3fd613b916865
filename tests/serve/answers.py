"""A client of a service whose every answer is checked against the service's own OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import urllib3

TOKEN = "correct-horse-battery-staple"


@dataclass
class Client:
    """Asks the service at `base`; with the token, unless it is None."""

    base: str
    token: str | None = TOKEN
    pool: urllib3.PoolManager = field(default_factory=lambda: urllib3.PoolManager(retries=False, timeout=200))
    seen: set[str] = field(default_factory=set)
    """Operations that answered as the document says, by id."""

    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.document = self.document or self.raw("GET", "/api/openapi.json").json()

    def raw(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Return the response of urllib3."""
        sent = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        sent |= headers or {}
        data = None
        if body is not None:
            data, sent = json.dumps(body), {"Content-Type": "application/json"} | sent
        return self.pool.request(method, f"{self.base}{path}", body=data, headers=sent)

    def get(self, path: str, status: int = 200) -> Any:
        """Return the JSON of an answer with that status."""
        return self._checked("GET", path, None, status)

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        """Send JSON; return the JSON of an answer with that status."""
        return self._checked("POST", path, body, status)

    def _checked(self, method: str, path: str, body: Any, status: int) -> Any:
        response = self.raw(method, path, body)
        found = response.json()
        assert response.status == status, found
        assert response.headers["content-type"] == "application/json"
        operation = self._operation(method, path.partition("?")[0])
        described = operation["responses"][str(status)]["content"]["application/json"]["schema"]
        schema = {**described, "components": self.document["components"]}
        jsonschema.validate(found, schema, cls=jsonschema.Draft202012Validator)
        self.seen.add(operation["operationId"])
        return found

    def _operation(self, method: str, path: str) -> dict[str, Any]:
        for template, operations in self.document["paths"].items():
            pattern = re.sub(r"\\\{(checkpoint|path)\\\}", ".+", re.escape(template))
            if method.lower() in operations and re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", pattern), path):
                return dict(operations[method.lower()])
        raise AssertionError(f"the document has no {method} {path}")
