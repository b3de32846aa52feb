"""From the settings to a source of addresses, and to a node's own entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transfer.config import DiscoveryConfig
from transfer.registry.discovery.dns import DnsNodes
from transfer.registry.discovery.health_gate import HealthGate
from transfer.registry.discovery.node_file import NodeFile
from transfer.registry.discovery.static import GivenNodes
from transfer.registry.discovery.watcher import Discovery
from transfer.registry.security import Security

if TYPE_CHECKING:
    from transfer.registry.discovery.registration import Registration


def open_discovery(found: DiscoveryConfig, prefill_nodes: Sequence[str], security: Security) -> Discovery:
    """What finds the prefill nodes of a decode side, not yet begun.

    Args:
        prefill_nodes: Those that the settings name.
    """
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
            return Discovery(GivenNodes(prefill_nodes), security=security)


def open_registration(config: DiscoveryConfig) -> Registration | None:
    """A prefill side's own entry, not yet begun; None where they do not register."""
    if config.kind != "etcd":
        return None
    from transfer.registry.discovery.etcd import EtcdMembers
    from transfer.registry.discovery.registration import Registration

    return Registration(config, EtcdMembers(config))
