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
    # An operator's; the nodes of the other tier may see how a node is, for the page that shows both tiers.
    "/kvferry.v1.NodeControl/Status": _BOTH,
    "/kvferry.v1.NodeControl/ListRequests": _CLIENT,
    "/kvferry.v1.NodeControl/Abort": _CLIENT,
    "/kvferry.v1.NodeControl/Drain": _CLIENT,
    "/kvferry.v1.NodeControl/Undrain": _CLIENT,
    "/kvferry.v1.NodeControl/SetLogLevel": _CLIENT,
    "/kvferry.v1.NodeControl/SwitchRole": _CLIENT,
    # A decode node's part; it may also give up a transfer that it asked for.
    "/kvferry.v1.PrefillControl/Join": _PEER,
    "/kvferry.v1.PrefillControl/Prefill": _PEER,
    "/kvferry.v1.PrefillControl/PrefillIntoRoom": _PEER,
    "/kvferry.v1.PrefillControl/Abort": _BOTH,
    "/kvferry.v1.PrefillControl/Status": _CLIENT,
    "/kvferry.v1.PrefillControl/Drain": _CLIENT,
    # Reserve is a prefill node's; the rest is what clients and operators come for.
    "/kvferry.v1.DecodeControl/Generate": _CLIENT,
    "/kvferry.v1.DecodeControl/Reserve": _PEER,
    "/kvferry.v1.DecodeControl/Abort": _CLIENT,
    "/kvferry.v1.DecodeControl/Status": _CLIENT,
    "/kvferry.v1.DecodeControl/Drain": _CLIENT,
    # Prefill ranks alone.
    "/kvferry.v1.TransferControl/Attach": _PEER,
    "/kvferry.v1.TransferControl/Watermarks": _PEER,
    # Whether a node serves is no secret between those who may speak to it; what it offers is for those who explore.
    "/grpc.health.v1.Health/Check": _BOTH,
    "/grpc.health.v1.Health/List": _BOTH,
    "/grpc.health.v1.Health/Watch": _BOTH,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _CLIENT,
}
"""Method -> roles that may call it. Nobody may call a method that is not here."""
