"""Typed access to a parsed ``config.json``. Errors name the field, its value, and what would be right.

As in the configuration classes of transformers, an absent field is not the same as ``null``: an absent field has the class's
default, ``null`` often means "none" or "as another field says".
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from transfer.errors import ConfigError

REQUIRED: Final = -1
"""In place of the default of a field that has none."""

MAX_COUNT: Final = 1 << 40
"""Upper bound of sizes, far above every model; products of a few such sizes stay finite as floats."""

_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def shown(value: object) -> str:
    """Return a value as a short text for messages."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python does not print an integer of more than some thousand digits
        return "a number of thousands of digits"


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of one mapping. `source` is its name in messages, for example ``config.json: text_config.``."""

    values: Mapping[str, object]
    source: str

    def wrong(self, name: str, right: str) -> ConfigError:
        """Return the error for a wrong field."""
        found = f"is {shown(self.values[name])}" if name in self.values else "is missing"
        return ConfigError(f"{self.source}{name} {found}; must be {right}")

    def count(self, name: str, *, absent: int = REQUIRED, null: int = REQUIRED, least: int = 1, most: int = MAX_COUNT) -> int:
        """Return an integer from `least` to `most`; `absent` and `null` are the defaults of an absent and a null field."""
        right = "a positive integer" if least == 1 else f"an integer of at least {least}"
        if name not in self.values and absent != REQUIRED:
            return absent
        value = self.values.get(name)
        if name in self.values and value is None and null != REQUIRED:
            return null
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, right)
        if value > most:
            raise self.wrong(name, f"{right}, at most {most}")
        return value

    def flag(self, name: str, *, absent: bool) -> bool:
        value = self.values.get(name, absent)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return a text; None if the field is absent or null."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def part(self, name: str) -> ConfigFields | None:
        """Return the fields of a nested mapping; None if the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return ConfigFields(value, f"{self.source}{name}.")

    def layer_numbers(self, name: str) -> frozenset[int]:
        """Return a list of layer numbers; empty if the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise self.wrong(name, "a list of layer numbers")
        return frozenset(value)

    def layer_types(self, num_layers: int, known: Sequence[str]) -> tuple[str, ...] | None:
        """Return ``layer_types``, one of `known` for each layer; None if the field is absent or null."""
        value = self.values.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers or not all(one in known for one in value):
            raise self.wrong("layer_types", f"a list of {num_layers} entries, each of them {' or '.join(known)}")
        return tuple(value)
