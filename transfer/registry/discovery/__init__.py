"""Which prefill nodes there are now: given, in a file, behind a DNS name, or registered in etcd.

A `Source` is one way to learn their addresses; `Discovery` keeps what the last good look has found, and tells whoever uses it.
Addresses are only where nodes may be: that a node is there, and which one, is known once it is joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer.config import DecodeNodeConfig, PrefillNodeConfig
from transfer.registry.discovery.sources import DnsNodes, GivenNodes, HealthGate, NodeFile
from transfer.registry.discovery.watcher import Discovery, DiscoveryView, Looks, Source
from transfer.registry.security import Security

if TYPE_CHECKING:
    from transfer.registry.discovery.etcd import Registration

__all__ = ["Discovery", "DiscoveryView", "Looks", "Source", "open_discovery", "open_registration"]


def open_discovery(config: DecodeNodeConfig, security: Security) -> Discovery:
    """What finds the prefill nodes of a decode node, not yet begun."""
    found = config.discovery
    match found.kind:
        case "dns":
            assert found.dns_name is not None
            return Discovery(
                DnsNodes(found.dns_name, interval_s=found.interval_s), security=security, ask=HealthGate(security).why_not
            )
        case "etcd":
            from transfer.registry.discovery.etcd import EtcdMembers, EtcdNodes

            return Discovery(EtcdNodes(found, EtcdMembers(found)), security=security)
        case "static" if found.file is not None:
            return Discovery(NodeFile(found.file, interval_s=found.interval_s), security=security)
        case _:
            return Discovery(GivenNodes(config.peers.prefill_nodes), security=security)


def open_registration(config: PrefillNodeConfig) -> Registration | None:
    """A prefill node's own entry, not yet begun; None where nodes do not register."""
    if config.discovery.kind != "etcd":
        return None
    from transfer.registry.discovery.etcd import EtcdMembers, Registration

    return Registration(config.discovery, EtcdMembers(config.discovery))
