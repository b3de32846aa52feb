"""Which prefill nodes there are now: given, in a file, behind a DNS name, or registered in etcd.

A `Source` is one way to learn their addresses; `Discovery` keeps what the last good look has found, and tells whoever uses it.
Addresses are only where nodes may be: that a node is there, and which one, is known once it is joined.
"""

from transfer.registry.discovery.open import open_discovery, open_registration
from transfer.registry.discovery.source import Looks, Source
from transfer.registry.discovery.watcher import Discovery, DiscoveryView

__all__ = ["Discovery", "DiscoveryView", "Looks", "Source", "open_discovery", "open_registration"]
