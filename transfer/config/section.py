"""What a section of settings is, and how all settings of one are found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

ENVIRONMENT_PREFIX: Final = "KVFERRY_"


class Section(BaseModel):
    """Immutable; an unknown setting is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


def section_type(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a section; None where the field is a setting."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting of a section and of those inside it, as (path, field)."""
    for name, field in section.model_fields.items():
        inner = section_type(field)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from settings(inner, f"{prefix}{name}.")
