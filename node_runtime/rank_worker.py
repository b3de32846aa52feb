"""The interface of a rank's worker, which differs between prefill and decode, and the values that a rank process starts with."""

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
    """The values that a rank process starts with.

    Args:
        config: Settings of the node.
        rank: Index in the instance.
        incarnation: This life of the rank group.
        address: Address of the leader.
        rendezvous: New file at which the ranks of a TP group meet.
        other_config: Settings of the node's other role. None means that it has none.
    """

    config: NodeConfig
    rank: int
    incarnation: int
    address: RankAddress
    rendezvous: Path
    other_config: NodeConfig | None = None

    @property
    def device(self) -> str:
        """Torch's name of the rank's device."""
        config = self.config
        return config.device if config.device == "cpu" else f"{config.device}:{config.first_device + self.rank}"

    def switched(self, message: RankSwitch) -> RankSpec:
        """Return the values for the life in the other role."""
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
    """The part of a rank that its role determines. Owned by the loop of the process."""

    async def start(self) -> RankReady:
        """Load the engine, allocate memory and open the ports.

        Raises:
            TransferError: This failed, and everything but the engine is closed. The node ends with the error, or keeps its role.
        """
        ...

    def on_message(self, message: Any) -> None: ...

    def status(self) -> dict[str, Any]:
        """Return the fields of `RankStatus`."""
        ...

    def check_idle(self) -> bool:
        """Check the invariants of an idle rank; return False without a check if something is in flight. Cheap.

        Raises:
            LocalProtocolError: An invariant is broken; the message names it.
        """
        ...

    def metrics(self, status: Mapping[str, Any]) -> Any:
        """Return a snapshot of the rank's metrics. `status` is the result of `status()`."""
        ...

    async def close(self) -> None:
        """Close everything but the engine, which has no work when this returns."""
        ...


WorkerFactory = Callable[[RankSpec, RankLink, asyncio.AbstractEventLoop, RankEngine], Worker]
