"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from transfer.errors import ConfigError

_LONGEST_S: Final = 86_400
"""As of every setting in seconds; to gRPC a deadline of 1e300 s is one that has passed."""

AnyEnum = TypeVar("AnyEnum", bound=StrEnum)

Target = Annotated[str, typer.Option(metavar="HOST:PORT", help="gRPC address of a node.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with a section tls, as a node has it.")]
TlsCert = Annotated[Path | None, typer.Option(help="PEM certificate of the caller (tls.cert_file).")]
TlsKey = Annotated[Path | None, typer.Option(help="Its PEM private key (tls.key_file).")]
TlsCa = Annotated[Path | None, typer.Option(help="PEM authorities of the node's certificate (tls.ca_file).")]
PeerName = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="Name that the node's certificate may have (tls.peer_names); by default the target's host."
    ),
]
Insecure = Annotated[
    int, typer.Option("--insecure", count=True, help="Without TLS, on loopback addresses; twice: on any (tls.insecure).")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


def check_timeout(timeout_s: float) -> None:
    """Whether a `--timeout` can be waited for.

    Raises:
        ConfigError: It cannot.
    """
    if not 0 < timeout_s <= _LONGEST_S:
        raise ConfigError(f"--timeout is {timeout_s:g}; it must be above 0 and at most {_LONGEST_S} seconds")


def check_range(option: str, number: int, least: int, most: int) -> None:
    """Check that a number is in a range.

    Raises:
        ConfigError: It is not.
    """
    if not least <= number <= most:
        raise ConfigError(f"{option} is {number}; it must be in [{least}, {most}]")


def member(kind: type[AnyEnum], option: str, text: str) -> AnyEnum:
    """Return the member with that value.

    Raises:
        ConfigError: There is none; the message lists the values.
    """
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; it must be one of {', '.join(kind)}") from None
