"""An OpenAPI 3.1 document made from a table of endpoints and the types they carry."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from coordinator.version import version
from sidecar.roles import Role

JSON: Final = "application/json"
"""A response that is JSON of no fixed shape."""
HTML: Final = "text/html"
"""A page for a browser."""
METRICS_TEXT: Final = "text/plain"
"""A response in Prometheus' exposition format."""
_REF: Final = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One value in the path or in the query."""

    name: str
    place: str
    text: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of an API.  ``result`` is a dataclass or a content type.

    ``without`` names fields of ``result`` that are left out, ``refusals`` the statuses that an
    error may have besides 401 and 403.
    """

    method: str
    path: str
    operation: str
    summary: str
    result: type | str
    parameters: tuple[Parameter, ...] = ()
    body: type | None = None
    status: int = 200
    without: tuple[str, ...] = ()
    refusals: tuple[int, ...] = ()
    public: bool = False
    """Answered without a token, for probes that carry none."""
    role: Role = Role.VIEWER
    """Whom it is for."""


def document(endpoints: Iterable[Endpoint], problem: type) -> dict[str, Any]:
    """Return the OpenAPI document; ``problem`` is the shape of every error."""
    rows = list(endpoints)
    types = [problem, *(row.result for row in rows if isinstance(row.result, type))]
    types += [row.body for row in rows if row.body is not None]
    names, components = msgspec.json.schema_components(types, ref_template=_REF)
    refs = dict(zip(types, names, strict=True))
    for row in rows:
        for name in row.without:
            assert isinstance(row.result, type), "only a dataclass has fields to leave out"
            schema = components[row.result.__name__]
            del schema["properties"][name]
            schema["required"].remove(name)
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row, refs, refs[problem])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider coordinator",
            "version": version(),
            "summary": "One training job: what it is, what happened to it, what to do.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}, {"certificate": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed when the coordinator was started with a token file.",
                },
                "certificate": {
                    "type": "mutualTLS",
                    "description": "Needed when it was started with certificates and no token.",
                },
            },
        },
    }


def _operation(row: Endpoint, refs: Mapping[type, Any], problem: Any) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": row.operation,
        "summary": row.summary,
        "description": f"For the role `{row.role}`." if not row.public else "For everybody.",
        "responses": {
            str(row.status): _response(HTTPStatus(row.status).phrase, row.result, refs),
            **{
                str(status): {
                    "description": HTTPStatus(status).phrase,
                    "content": {JSON: {"schema": problem}},
                }
                for status in sorted({*(() if row.public else (401, 403)), *row.refusals})
            },
        },
    }
    if row.public:
        operation["security"] = []
    if row.parameters:
        operation["parameters"] = [
            {
                "name": item.name,
                "in": item.place,
                "required": item.place == "path",
                "description": item.text,
                "schema": dict(item.schema),
            }
            for item in row.parameters
        ]
    if row.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": refs[row.body]}},
        }
    return operation


def _response(text: str, result: type | str, refs: Mapping[type, Any]) -> dict[str, Any]:
    if isinstance(result, type):
        return {"description": text, "content": {JSON: {"schema": refs[result]}}}
    schema = {"type": "object"} if result == JSON else {"type": "string"}
    return {"description": text, "content": {result: {"schema": schema}}}
