"""Custom resources, held to the schemas that their operators install; strict: a field that no schema has is wrong."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Final

import jsonschema

SCHEMAS: Final = Path(__file__).with_name("schemas")


@functools.cache
def _schemas() -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    """By apiVersion and kind."""
    found = {}
    for file in SCHEMAS.glob("*.json"):
        page = json.loads(file.read_text(encoding="utf-8"))
        schema = _strict(page["schema"])
        found[f"{page['group']}/{page['version']}", page["kind"]] = jsonschema.Draft202012Validator(schema)
    return found


def _strict(schema: Any) -> Any:
    """As the API server takes it with strict validation of fields: what is not named is refused."""
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
    """What its schema has against a custom resource; empty where there is nothing."""
    errors = _schemas()[manifest["apiVersion"], manifest["kind"]].iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in errors]
