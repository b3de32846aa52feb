"""Options that several commands have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from node_runtime.command_line import SECURITY_PANEL, Insecure, InsecureAnywhere, insecure_level
from transfer.errors import ConfigError

if TYPE_CHECKING:
    from transfer.registry.security import Security

_LONGEST_S: Final = 86_400
"""As of every setting in seconds; to gRPC a deadline of 1e300 s is one that has passed."""

AnyEnum = TypeVar("AnyEnum", bound=StrEnum)

Target = Annotated[str, typer.Option(metavar="HOST:PORT", help="gRPC address of a node.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter whose type is a dataclass with the options that the fields of the dataclass declare."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {one.name: one.annotation for one in signature.parameters.values() if is_dataclass(one.annotation)}
    parameters: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        group = groups.get(one.name)
        parameters += (one,) if group is None else inspect.signature(group, eval_str=True).parameters.values()

    @functools.wraps(command)
    def with_groups(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        return command(**given)

    with_groups.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_groups


def _tls_option(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SECURITY_PANEL, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Options by which a command calls nodes. Each field is an option of the command."""

    file: Annotated[Path | None, _tls_option("--config", help="YAML file with a section tls, as in the settings of a node.")] = (
        None
    )
    cert: Annotated[Path | None, _tls_option("--tls-cert", help="PEM certificate of the caller (tls.cert_file).")] = None
    key: Annotated[Path | None, _tls_option("--tls-key", help="PEM private key of that certificate (tls.key_file).")] = None
    ca: Annotated[
        Path | None, _tls_option("--tls-ca", help="PEM certificates of the authorities of the node's certificate (tls.ca_file).")
    ] = None
    peer_names: Annotated[
        list[str] | None,
        _tls_option(
            "--peer-name",
            metavar="NAME",
            help="Name that the node's certificate may have (tls.peer_names); by default the target's host.",
        ),
    ] = None
    insecure: Insecure = 0
    insecure_anywhere: InsecureAnywhere = False

    def arguments(self, command: str) -> dict[str, Any]:
        """Return the arguments of `client_security`, by name."""
        found = asdict(self)
        level = insecure_level(f"kvferry {command}", self.insecure, found.pop("insecure_anywhere"))
        return found | {"insecure": level or 0}

    def security(self, command: str, *targets: str, what: str = "--target") -> Security:
        """Return the security with which `command` calls `targets`; see `client_security`."""
        from kvferry.cli.client_settings import client_security

        return client_security(command, *targets, what=what, **self.arguments(command))


def check_timeout(timeout_s: float) -> None:
    """Check that a `--timeout` can be waited for.

    Raises:
        ConfigError: It cannot.
    """
    if not 0 < timeout_s <= _LONGEST_S:
        raise ConfigError(f"--timeout is {timeout_s:g}; it must be above 0 and at most {_LONGEST_S} seconds")


def check_word(what: str, word: str, known: Sequence[str]) -> None:
    """Check that a word is known.

    Raises:
        ConfigError: It is not; the message lists the words.
    """
    if word not in known:
        raise ConfigError(f"{what} is {word!r}; it must be one of {', '.join(known)}")


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
