"""The callers of each method that a kvferry server has, in one table."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class CallerRole(StrEnum):
    """Role of a caller: the allow-list that has a name of its certificate. One name can be in both lists."""

    PEER = "peer"
    CLIENT = "client"

    @property
    def setting(self) -> str:
        return f"tls.{self.value}_names"


_PEER: Final = frozenset({CallerRole.PEER})
_CLIENT: Final = frozenset({CallerRole.CLIENT})
_BOTH: Final = _PEER | _CLIENT

METHOD_ROLES: Final[dict[str, frozenset[CallerRole]]] = {
    # For operators. Nodes of the other tier may call Status, for the page that shows both tiers.
    "/kvferry.v1.NodeControl/Status": _BOTH,
    "/kvferry.v1.NodeControl/ListRequests": _CLIENT,
    "/kvferry.v1.NodeControl/Abort": _CLIENT,
    "/kvferry.v1.NodeControl/Drain": _CLIENT,
    "/kvferry.v1.NodeControl/Undrain": _CLIENT,
    "/kvferry.v1.NodeControl/SetLogLevel": _CLIENT,
    "/kvferry.v1.NodeControl/SwitchRole": _CLIENT,
    # For decode nodes, which may also abort a transfer that they asked for.
    "/kvferry.v1.PrefillControl/Join": _PEER,
    "/kvferry.v1.PrefillControl/Prefill": _PEER,
    "/kvferry.v1.PrefillControl/PrefillIntoRoom": _PEER,
    "/kvferry.v1.PrefillControl/Abort": _BOTH,
    "/kvferry.v1.PrefillControl/Status": _CLIENT,
    "/kvferry.v1.PrefillControl/Drain": _CLIENT,
    # Reserve is for prefill nodes, the rest for clients and operators.
    "/kvferry.v1.DecodeControl/Generate": _CLIENT,
    "/kvferry.v1.DecodeControl/Reserve": _PEER,
    "/kvferry.v1.DecodeControl/Abort": _CLIENT,
    "/kvferry.v1.DecodeControl/Status": _CLIENT,
    "/kvferry.v1.DecodeControl/Drain": _CLIENT,
    # For prefill ranks only.
    "/kvferry.v1.TransferControl/Attach": _PEER,
    "/kvferry.v1.TransferControl/Watermarks": _PEER,
    # All callers may ask whether a node serves. Reflection is for clients.
    "/grpc.health.v1.Health/Check": _BOTH,
    "/grpc.health.v1.Health/List": _BOTH,
    "/grpc.health.v1.Health/Watch": _BOTH,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _CLIENT,
}
"""Method -> roles that may call it. Nobody may call a method that is not here."""
