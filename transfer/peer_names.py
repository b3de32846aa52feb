"""Allow-lists of names: the subject alternative names of certificates that are accepted.

An entry is one of

- a DNS name, ``decode-0.example``: equal except for case;
- a DNS name whose first label is ``*``, ``*.decode.example``: any one label there, and no other number of labels;
- a URI, ``spiffe://cluster.example/decode``: equal, including case.

Only a certificate's names count, never its subject or the address it came from. A name with a wildcard in a certificate
identifies nobody, and matches nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_ENTRY: Final = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")
_URI_ENTRY: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[\x21-\x7e]+")
_MAX_SHOWN: Final = 3
_MAX_SHOWN_CHARS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectNames:
    """The names in a certificate: its DNS names and its URIs."""

    dns: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the first names for people, clipped and escaped, because the certificate's owner chose them."""
        names = [*self.uris, *self.dns]
        if not names:
            return "a certificate without a DNS name or URI"
        shown = [ascii(name)[1:-1][:_MAX_SHOWN_CHARS] for name in names[:_MAX_SHOWN]]
        return ", ".join(shown) + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")


def checked_entry(entry: str) -> str:
    """Return `entry` if an allow-list can hold it. Raise ValueError if it is no DNS name and no URI."""
    is_uri = "://" in entry
    if not (_URI_ENTRY if is_uri else _DNS_ENTRY).fullmatch(entry) or _is_address(entry) or ("*" in entry and is_uri):
        raise ValueError(
            f"{entry!r} is not a valid name; it must be a DNS name (decode-0.example, *.decode.example) or a URI (spiffe://example/decode)"
        )
    return entry


def first_match(allowed: Iterable[str], names: SubjectNames) -> str | None:
    """Return the first of a certificate's names, DNS names first, that an allow-list has; None without one."""
    entries = tuple(allowed)
    for name in names.dns:
        if any(_matches_dns(entry, name) for entry in entries if "://" not in entry):
            return name
    return next((uri for uri in names.uris if "://" in uri and uri in entries), None)


def _matches_dns(entry: str, name: str) -> bool:
    if "*" in name:
        return False
    wanted, found = entry.lower(), name.lower()
    if wanted.startswith("*."):
        label, _, rest = found.partition(".")
        return bool(label) and rest == wanted[2:]
    return found == wanted


def _is_address(entry: str) -> bool:
    try:
        ipaddress.ip_address(entry)
    except ValueError:
        return False
    return True


def dns_name_of(names: Sequence[str]) -> str | None:
    """Return a DNS name that a certificate with these names is valid for, or None."""
    plain = [name for name in names if "*" not in name]
    return next(iter([*plain, *(name.replace("*", "x", 1) for name in names)]), None)
