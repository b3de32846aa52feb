"""Separate the entries of a look that can be addresses of prefill nodes from the others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from transfer.config.values import checked_host_port
from transfer.errors import ConfigError
from transfer.registry.options import MAX_PEERS

MAX_FOUND: Final = MAX_PEERS
"""Addresses of one look. Each costs a join that is kept up, or tried again for ever."""

MAX_SHOWN_CHARS: Final = 100
"""Length of a refused entry in the log: its text comes from others."""

_MAX_REFUSED: Final = 64  # entries that are kept


class RefusedFor(StrEnum):
    """Why an entry is not used."""

    MALFORMED = "malformed"
    TOO_MANY = "too_many"
    PLAIN_TEXT = "plain_text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An entry that is not used; `reason` names it."""

    entry: str
    kind: RefusedFor
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """Entries of one look.

    Args:
        addresses: Entries that can be used, each once, sorted.
        refused: The other entries, up to a limit.
    """

    addresses: tuple[str, ...]
    refused: tuple[Refused, ...]


def sort_entries(entries: Iterable[object], check: Callable[[str], None], *, most: int = MAX_FOUND) -> Sorted:
    """Sort the entries of a look into addresses and refused entries.

    If there are too many, the choice does not depend on their order, so that every look, and every decode node, uses the same.

    Args:
        check: Raises ConfigError for an address that may not be called.
        most: Addresses that are used.
    """
    good: set[str] = set()
    refused: dict[str, Refused] = {}

    def refuse(entry: str, kind: RefusedFor, reason: str) -> None:
        if len(refused) < _MAX_REFUSED:
            refused[entry] = Refused(entry=entry, kind=kind, reason=reason)

    for entry in entries:
        text = entry if isinstance(entry, str) else type(entry).__name__  # a few bytes of YAML can be gigabytes of text
        shown = ascii(text[:MAX_SHOWN_CHARS])[1:-1]
        try:
            if not isinstance(entry, str) or not entry.isascii() or any(not "!" <= letter <= "~" for letter in entry):
                raise ValueError("it must be host:port with a port from 1 to 65535, an IPv6 host in brackets")
            good.add(checked_host_port(entry))
        except ValueError as error:
            refuse(shown, RefusedFor.MALFORMED, f"{shown}: {error}")
    allowed = []
    for address in sorted(good):
        try:
            check(address)
        except ConfigError as error:
            refuse(address, RefusedFor.PLAIN_TEXT, str(error))
        else:
            allowed.append(address)
    for address in allowed[most:]:
        refuse(address, RefusedFor.TOO_MANY, f"{address}: {len(allowed)} prefill nodes are named; there can be {most}")
    return Sorted(addresses=tuple(allowed[:most]), refused=tuple(refused.values()))
