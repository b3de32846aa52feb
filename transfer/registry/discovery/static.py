"""Prefill nodes that the settings name."""

from __future__ import annotations

from transfer.registry.discovery.source import Looks


class GivenNodes:
    """A source of addresses that never change.

    Args:
        addresses: host:port of each.
    """

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses

    @property
    def where(self) -> str:
        return "peers.prefill_nodes"

    async def follow(self, looks: Looks) -> None:
        looks.saw(self._addresses)
