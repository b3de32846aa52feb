"""From the settings to a source of addresses, and to a node's own entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer.config import DiscoveryConfig
from transfer.registry.discovery.dns import DnsNodes
from transfer.registry.discovery.health_gate import HealthGate
from transfer.registry.discovery.node_file import NodeFile
from transfer.registry.discovery.source import Source
from transfer.registry.discovery.static import GivenNodes
from transfer.registry.discovery.watcher import Discovery
from transfer.registry.security import Security

if TYPE_CHECKING:
    from transfer.registry.discovery.registration import Registration


def open_discovery(found: DiscoveryConfig, prefill_nodes: tuple[str, ...], security: Security) -> Discovery:
    """What finds the prefill nodes of a decode side, not yet begun.

    Args:
        prefill_nodes: Those that the settings name.
    """
    ask, interval_s = None, found.interval_s
    source: Source
    match found.kind:
        case "dns":
            assert found.dns_name is not None
            source, ask = DnsNodes(found.dns_name, interval_s=interval_s), HealthGate(security).why_not
        case "etcd":
            from transfer.registry.discovery.etcd import EtcdMembers, EtcdNodes

            source = EtcdNodes(found, EtcdMembers(found))
        case "static" if found.file is not None:
            source = NodeFile(found.file, interval_s=interval_s)
        case _:
            source, interval_s = GivenNodes(prefill_nodes), 0.0
    return Discovery(source, security=security, ask=ask, interval_s=interval_s)


def open_registration(config: DiscoveryConfig) -> Registration | None:
    """A prefill side's own entry, not yet begun; None where they do not register."""
    if config.kind != "etcd":
        return None
    from transfer.registry.discovery.etcd import EtcdMembers
    from transfer.registry.discovery.registration import Registration

    return Registration(config, EtcdMembers(config))
