"""Find the present prefill nodes: given, in a file, behind a DNS name, or registered in etcd.

A `Source` is one way to learn their addresses. `Discovery` keeps the result of the last good look, and tells its listeners.
A node can be at each address; whether it is there, and its identity, is known after a join.
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
    """Return the discovery of a decode node's prefill nodes, not yet started."""
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
    """Return the registration of a prefill node, not yet started; None if nodes do not register."""
    if config.discovery.kind != "etcd":
        return None
    from transfer.registry.discovery.etcd import EtcdMembers, Registration

    return Registration(config.discovery, EtcdMembers(config.discovery))
