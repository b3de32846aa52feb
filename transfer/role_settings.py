"""A node's settings in its other role, and the settings that both roles must share.

A change of role keeps a node's processes, their loaded model and their ports. So the settings of these must be equal in both
roles. All others may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig, settings
from transfer.errors import ConfigError
from transfer.load_config import load_config

KEPT: Final = (
    "model", "engine", "device", "first_device", "dtype", "dummy_weights", "kernels", "parallel", "server", "tls", "log",
    "restart", "drain_timeout_s", "ready_file", "status_page", "speculative.model",
)  # fmt: skip
"""Settings, and sections of them, that a change of role leaves as they are."""

NOT_SHARED: Final = ("offload",)
"""Sections that both roles have, but that a role does not take from the other one. Each role uses host memory differently."""

_OTHER: Final[Mapping[type[NodeConfig], type[NodeConfig]]] = {
    PrefillNodeConfig: DecodeNodeConfig,
    DecodeNodeConfig: PrefillNodeConfig,
}


def load_other_role(config: NodeConfig) -> NodeConfig | None:
    """Return the node's settings in its other role, or None without one.

    They come from the file `other_role`. Settings that it does not name come from `config` if both roles have them, except those
    in `NOT_SHARED`. Raise ConfigError if a setting is invalid, or differs and must not; one line for each.
    """
    file = config.other_role
    if file is None:
        return None
    other_type = _OTHER[type(config)]
    known = {path for path, _ in settings(other_type)} - {"other_role"}
    given = config.model_dump(exclude_unset=True)
    shared = {path: value for path, value in _values(given, "") if path in known and path.partition(".")[0] not in NOT_SHARED}
    try:
        other = load_config(other_type, file=file, defaults={f"the settings of the {config.role} node": shared})
    except ConfigError as error:
        raise ConfigError("\n".join(f"other_role is {file}: {line}" for line in str(error).splitlines())) from error
    own = dict(_values(config.model_dump(), ""))
    differing = [
        f"other_role is {file}: {path} is {value}, and {own[path]} in the settings of the {config.role} node; a change of role "
        "leaves it as it is: leave it out of that file"
        for path, value in _values(other.model_dump(), "")
        if {path, path.partition(".")[0]} & set(KEPT) and value != own[path]
    ]
    if differing:
        raise ConfigError("\n".join(differing))
    return other


def _values(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
