"""Define a section of settings, and the types of its values with their errors."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from transfer.peer_names import checked_entry

ENVIRONMENT_PREFIX: Final = "KVFERRY_"

EMBEDDED_ENGINE: Final = "embedded_engine.loading:load_engine"
"""Engine of kvferry: a transformers model over the paged pool."""


MAX_PORT: Final = 65_535


class Section(BaseModel):
    """Base of all sections. Immutable; rejects unknown settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


def section_type(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a section, or None if the field is a setting."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting of a section and of those inside it, as (path, field)."""
    for name, field in section.model_fields.items():
        inner = section_type(field)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from settings(inner, f"{prefix}{name}.")


_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}

_MOST_DIGITS: Final = 20
"""Most digits of a size, as 2**64 has. Sums of sizes stay in the range of a float."""


def parse_size(value: object) -> object:
    """Return the bytes of ``"64MiB"``, ``"1.5 GB"`` or ``4096``. Leave values of other types to the next check.

    Raises:
        ValueError: The text is no size, or no whole number of bytes.
    """
    if isinstance(value, bool):
        raise ValueError("it must be a size in bytes, for example 4096 or 64MiB")
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError("it must be a size, for example 4096, 64MiB or 1GB (KiB, MiB, GiB, TiB; KB, MB, GB, TB)")
    if len(match[1]) > _MOST_DIGITS:
        raise ValueError(f"it must be a size of at most {_MOST_DIGITS} digits")
    num_bytes = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    if num_bytes != int(num_bytes):
        raise ValueError("it must be a whole number of bytes")
    return int(num_bytes)


def no_bool(value: object) -> object:
    """Return the value. Reject a bool, which pydantic would accept as a number."""
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def whole(value: object) -> object:
    """Return a choice among numbers, which are text in the environment."""
    value = no_bool(value)
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def listed(value: object) -> object:
    """Return a list, also from comma-separated text, as in the environment."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


_LABEL: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")

_LONG_NUMBER: Final = re.compile(r"[1-9][0-9]{10,}")
"""The name of a container can be digits by chance. More than ten digits are no short form of an IPv4 address."""

_SCHEMES: Final = frozenset(
    {"dns", "unix", "unix-abstract", "vsock", "ipv4", "ipv6", "xds", "google-c2p", "google-c2p-experimental"}
)
"""Schemes of gRPC: it takes ``unix:80`` for a socket file, not for a host."""


def checked_host_port(value: str) -> str:
    """Return `value` if it is host:port. Raise ValueError otherwise."""
    host, _, port = value.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= MAX_PORT) or not _is_host(host):
        raise ValueError("it must be host:port with a port from 1 to 65535, an IPv6 host in brackets")
    return value


def _is_host(host: str) -> bool:
    """Return whether it looks like an IPv4 address, an IPv6 address in brackets, or a host name."""
    is_bracketed = host.startswith("[") and host.endswith("]")
    labels = host.removesuffix(".").split(".")
    is_name = not labels[-1].isdigit() or _LONG_NUMBER.fullmatch(host) is not None  # no domain is a number
    if not is_bracketed and is_name:
        return len(host) <= 254 and all(map(_LABEL.fullmatch, labels)) and host.lower() not in _SCHEMES
    try:
        ipaddress.IPv6Address(host[1:-1]) if is_bracketed else ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def collector_url(value: str) -> str:
    """Return `value` if it is http://HOST:PORT or https://HOST:PORT. Raise ValueError otherwise."""
    scheme, colon, address = value.partition("://")
    if not colon or scheme not in ("http", "https"):
        raise ValueError("it must be http://HOST:PORT or https://HOST:PORT")
    return f"{scheme}://{checked_host_port(address)}"


def _host(value: str) -> str:
    if not value or any(letter.isspace() or letter in "/[]" for letter in value):
        raise ValueError("it must be a host name or an address, without port or brackets")
    return value


def _engine_name(value: str) -> str:
    module, colon, function = value.partition(":")
    if not colon or not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"it must be module:function, for example {EMBEDDED_ENGINE}")
    return value


Count = Annotated[int, BeforeValidator(no_bool), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(no_bool), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=86_400)]
SecondsOrZero = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=86_400)]
SizeBytes = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
Port = Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=MAX_PORT)]
Host = Annotated[str, AfterValidator(_host)]
EngineName = Annotated[str, AfterValidator(_engine_name)]
HostPort = Annotated[str, AfterValidator(checked_host_port)]
PeerName = Annotated[str, AfterValidator(checked_entry)]
