"""Address and security of a node that a command calls. Flags win over KVFERRY_TLS__..., and that wins over a YAML file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from transfer.config import ENVIRONMENT_PREFIX, ClientConfig
from transfer.config.values import checked_host_port
from transfer.errors import ConfigError
from transfer.load_config import load_config
from transfer.plain_text import check_plain_text
from transfer.registry.security import Security, security_of

_OWN_VARIABLES: Final = f"{ENVIRONMENT_PREFIX}TLS__"
"""Other variables are settings of a node, which may run in the same environment."""


def check_address(what: str, address: str) -> None:
    """Check that `address`, which `what` names (an option, for example), is a host:port.

    Raises:
        ConfigError: It is not.
    """
    try:
        checked_host_port(address)
    except ValueError as error:
        raise ConfigError(f"{what} is {address!r}; {error}") from None


def client_security(
    command: str,
    *targets: str,
    what: str = "--target",
    file: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    ca: Path | None = None,
    peer_names: Sequence[str] | None = None,
    insecure: int = 0,
) -> Security:
    """Return the security with which `command` calls `targets`, and print a warning if it is none.

    Args:
        targets: host:port of each node.
        what: The option that names them.
        file: YAML file with a section ``tls``.
        cert, key, ca, peer_names, insecure: Flags of the command; None, empty and 0 mean not given.

    Raises:
        ConfigError: A target is no host:port, a setting is invalid, or the node may not be called like this.
    """
    for target in targets:
        check_address(what, target)
    environment = {name: value for name, value in os.environ.items() if name.startswith(_OWN_VARIABLES)}
    flags = {
        "tls.cert_file": cert,
        "tls.key_file": key,
        "tls.ca_file": ca,
        "tls.peer_names": peer_names or None,
        "tls.insecure": insecure or None,
    }
    config = load_config(ClientConfig, file=file, environment=environment, flags=flags)
    warning = check_plain_text(config)
    security = security_of(config)
    for target in targets:
        security.check(what, target)
    if warning is not None:
        print(f"kvferry {command}: warning: {warning}", file=sys.stderr)
    return security
