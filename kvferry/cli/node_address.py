"""The host:port of a node that is called."""

from __future__ import annotations

from transfer.config.values import checked_host_port
from transfer.errors import ConfigError


def check_address(what: str, address: str) -> None:
    """Whether a node can be there.

    Args:
        what: Names the address, for example by its option.

    Raises:
        ConfigError: It is no host:port.
    """
    try:
        checked_host_port(address)
    except ValueError as error:
        raise ConfigError(f"{what} is {address!r}; {error}") from None
