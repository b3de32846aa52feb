"""How the commands that call a node reach it: their flags over KVFERRY_TLS__... of the environment."""

from __future__ import annotations

import os
import sys
from typing import Final

from transfer.config import ENVIRONMENT_PREFIX, ClientConfig
from transfer.errors import ConfigError
from transfer.load_config import load_config
from transfer.plain_text import check_plain_text, why_not_plain_text

_OWN_VARIABLES: Final = f"{ENVIRONMENT_PREFIX}TLS__"
"""The others are settings of a node, which may run in the same environment."""


def client_config(command: str, target: str, *, insecure: int) -> ClientConfig:
    """The settings of a command that calls `target`; a warning about them is printed.

    Args:
        command: Name of the command.
        target: host:port of the node.
        insecure: How often --insecure was given.

    Raises:
        ConfigError: A setting is wrong, or the node may not be called like this.
    """
    environment = {name: value for name, value in os.environ.items() if name.startswith(_OWN_VARIABLES)}
    config = load_config(ClientConfig, environment=environment, flags={"tls.insecure": insecure or None})
    warning = check_plain_text(config)
    refusal = why_not_plain_text("--target", target, config.tls.insecure)
    if refusal is not None:
        raise ConfigError(refusal)
    if warning is not None:
        print(f"kvferry {command}: warning: {warning}", file=sys.stderr)
    return config
