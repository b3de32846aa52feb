"""Find the present prefill nodes: given, in a file, behind a DNS name, or registered in etcd.

A `Source` is one way to learn their addresses. `Discovery` keeps the result of the last good look, and tells its listeners.
A node can be at each address; whether it is there, and its identity, is known after a join.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from transfer.config import DiscoveryConfig
from transfer.registry.discovery.sources import DnsNodes, GivenNodes, NodeFile, why_not_serving
from transfer.registry.discovery.watcher import Discovery, DiscoveryView, Looks, Source
from transfer.registry.security import Security

if TYPE_CHECKING:
    from transfer.registry.discovery.etcd import Registration

__all__ = ["Discovery", "DiscoveryView", "Looks", "Source", "open_discovery", "open_registration"]


def open_discovery(found: DiscoveryConfig, prefill_nodes: tuple[str, ...], security: Security) -> Discovery:
    """Return the discovery of a decode side's prefill nodes, not yet started.

    Args:
        prefill_nodes: Those that the settings name.
    """
    ask, interval_s = None, found.interval_s
    source: Source
    match found.kind:
        case "dns":
            assert found.dns_name is not None
            source, ask = DnsNodes(found.dns_name, interval_s=interval_s), partial(why_not_serving, security)
        case "etcd":
            from transfer.registry.discovery.etcd import EtcdMembers, EtcdNodes

            source = EtcdNodes(found, EtcdMembers(found))
        case "static" if found.file is not None:
            source = NodeFile(found.file, interval_s=interval_s)
        case _:
            source, interval_s = GivenNodes(prefill_nodes), 0.0
    return Discovery(source, security=security, ask=ask, interval_s=interval_s)


def open_registration(config: DiscoveryConfig) -> Registration | None:
    """Return the registration of a prefill side, not yet started; None if nodes do not register."""
    if config.kind != "etcd":
        return None
    from transfer.registry.discovery.etcd import EtcdMembers, Registration

    return Registration(config, EtcdMembers(config))
