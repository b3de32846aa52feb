"""The worker of a rank process, which differs between prefill and decode, and the values that a rank process starts with."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from node_runtime.rank_engine import RankEngine
from node_runtime.rank_link import RankAddress, RankLink
from node_runtime.rank_messages import RankSwitch
from transfer.config import NodeConfig
from transfer.connector.rank_report import RankReady


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a rank process is started with.

    Args:
        config: The node's settings.
        rank: Index in the instance.
        incarnation: This life of the rank group.
        address: Where the leader listens.
        rendezvous: Fresh file at which the ranks of a TP group meet.
        other_config: The node's settings in its other role; None where it has none.
    """

    config: NodeConfig
    rank: int
    incarnation: int
    address: RankAddress
    rendezvous: Path
    other_config: NodeConfig | None = None

    @property
    def device(self) -> str:
        """The rank's device, as torch names it."""
        config = self.config
        return config.device if config.device == "cpu" else f"{config.device}:{config.first_device + self.rank}"

    def switched(self, message: RankSwitch) -> RankSpec:
        """What the rank goes on with."""
        assert self.other_config is not None and self.other_config.role == message.role
        return dataclasses.replace(
            self,
            config=self.other_config,
            other_config=self.config,
            incarnation=message.incarnation,
            address=message.address,
            rendezvous=Path(message.rendezvous),
        )


class Worker(Protocol):
    """What makes a rank a prefill or a decode rank. Owned by the process's one loop."""

    async def start(self) -> RankReady:
        """Load the engine, take the memory, open the ports.

        Raises:
            TransferError: It cannot be done, and nothing is left open but the engine; the node ends with that error, or keeps the
                role that it had.
        """
        ...

    def on_message(self, message: Any) -> None: ...

    def status(self) -> dict[str, Any]:
        """Fields of the wire contract's RankStatus."""
        ...

    def check_idle(self) -> bool:
        """Prove what must hold of a rank on which nothing is in flight; False: something is, and nothing was looked at. Cheap.

        Raises:
            LocalProtocolError: An invariant is broken; the message names it.
        """
        ...

    def metrics(self, status: Mapping[str, Any]) -> Any:
        """Snapshot of the rank's metrics; `status` is what its report says of it."""
        ...

    async def close(self) -> None:
        """Give back everything but the engine, which rests when this returns."""
        ...


WorkerFactory = Callable[[RankSpec, RankLink, asyncio.AbstractEventLoop, RankEngine], Worker]
