"""Validate custom resources by the schemas of their operators; unknown fields are errors."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Final

import jsonschema

SCHEMAS: Final = Path(__file__).with_name("schemas")


@functools.cache
def _schemas() -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    """Return the validators by apiVersion and kind."""
    found = {}
    for file in SCHEMAS.glob("*.json"):
        page = json.loads(file.read_text(encoding="utf-8"))
        schema = _strict(page["schema"])
        found[f"{page['group']}/{page['version']}", page["kind"]] = jsonschema.Draft202012Validator(schema)
    return found


def _strict(schema: Any) -> Any:
    """Return a schema that rejects unknown fields, as the API server does with strict field validation."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _strict(value) for key, value in schema.items()}
    if isinstance(inner.get("properties"), dict) and not inner.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    if inner.get("x-kubernetes-int-or-string"):
        inner.pop("type", None)
    return inner


def is_known(manifest: dict[str, Any]) -> bool:
    return (manifest["apiVersion"], manifest["kind"]) in _schemas()


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return the validation errors of a custom resource; an empty list means that it is valid."""
    errors = _schemas()[manifest["apiVersion"], manifest["kind"]].iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in errors]
