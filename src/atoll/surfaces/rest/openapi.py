"""The OpenAPI document, made from the route table and the structs: it cannot say anything the code does not do."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

import atoll
from atoll import errors, model
from atoll.server.routes import PATHS, ROUTES

_REF = "#/components/schemas/{name}"
_INTEGERS = ("offset", "limit", "after", "stdout", "stderr", "stdout_from", "stderr_from", "mode")
_RAW = {
    ("GET", "v1/sandboxes/*/files"): "answer",
    ("PUT", "v1/sandboxes/*/files"): "body",
    ("GET", "v1/sandboxes/*/tar"): "answer",
    ("PUT", "v1/sandboxes/*/tar"): "body",
    ("POST", "v1/sandboxes/*/commands/*/stdin"): "body",
}


@cache
def document() -> Mapping[str, object]:
    kinds = [r.kind for r in ROUTES.values() if r.kind] + [r.answer for r in ROUTES.values() if r.answer]
    kinds += [model.CommandInfo, model.ExecResult]
    schemas, components = msgspec.json.schema_components(dict.fromkeys(kinds), ref_template=_REF)
    by_kind = dict(zip(dict.fromkeys(kinds), schemas, strict=True))
    paths: dict[str, dict[str, Mapping[str, object]]] = {}
    for key, found in ROUTES.items():
        paths.setdefault(PATHS[key], {})[key[0].lower()] = _operation(key, found, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "atoll", "version": atoll.__version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _error()}},
    }


def _operation(key: tuple[str, str], found: Any, by_kind: dict[Any, Any]) -> Mapping[str, object]:
    parameters: list[Mapping[str, object]] = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
        for part in PATHS[key].split("/")
        if part.startswith("{")
    ]
    for name in found.query:
        schema = {"type": "integer"} if name in _INTEGERS else {"type": "string"}
        parameters.append({"name": name, "in": "query", "required": name == "path", "schema": schema})
    raw = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    answer = {"application/json": {"schema": by_kind.get(found.answer, {"type": "object"})}}
    operation: dict[str, object] = {
        "operationId": f"{key[0].lower()}_{key[1].replace('/', '_').replace('*', 'x').replace('.', '_')}",
        "summary": found.does,
        "responses": {
            str(found.status): {"description": "done", "content": raw if _RAW.get(key) == "answer" else answer},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if found.kind is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": by_kind[found.kind]}}}
    elif _RAW.get(key) == "body":
        operation["requestBody"] = {"content": raw}
    return operation


def _error() -> Mapping[str, object]:
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "retry"],
                "properties": {
                    "code": {"type": "string", "enum": sorted(errors.BY_CODE)},
                    "message": {"type": "string"},
                    "retry": {"type": "string", "enum": ["no", "yes", "never"]},
                    "hint": {"type": "string"},
                    "details": {"type": "object"},
                },
            }
        },
    }
