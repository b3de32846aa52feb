"""From the settings to a source of addresses, and to a node's own entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer.config import DecodeNodeConfig, PrefillNodeConfig
from transfer.registry.discovery.dns import DnsNodes
from transfer.registry.discovery.health_gate import HealthGate
from transfer.registry.discovery.node_file import NodeFile
from transfer.registry.discovery.static import GivenNodes
from transfer.registry.discovery.watcher import Discovery
from transfer.registry.security import Security

if TYPE_CHECKING:
    from transfer.registry.discovery.registration import Registration


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
    from transfer.registry.discovery.etcd import EtcdMembers
    from transfer.registry.discovery.registration import Registration

    return Registration(config.discovery, EtcdMembers(config.discovery))
