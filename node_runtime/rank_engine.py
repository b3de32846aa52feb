"""A rank's engine and the thread that drives it: what outlives a worker when the node changes its role."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from node_runtime.rank_setup import engine_loader
from transfer.config import NodeConfig
from transfer.errors import EngineError
from transfer.worker_thread import WorkerThread


class RankEngine:
    """The engine of a rank's process, handed from worker to worker together with its thread.

    One thread for all of its life: what CUDA's current device is, and whether torch records gradients, each thread knows for
    itself.

    Args:
        loop: The loop of the rank's workers, of which there is one at a time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._engine: Any = None
        self.thread = WorkerThread("engine", loop, self._crash)

    @property
    def can_switch(self) -> bool:
        """Whether the engine can serve the other role, too; False while there is none."""
        return hasattr(self._engine, "switch_role")

    async def open(self, config: NodeConfig, **place: Any) -> Any:
        """The engine for the role of `config`: loaded for the first worker of the process, changed for every later one.

        Args:
            place: What the engine's loader is told of the rank, see `engine_loader`.

        Raises:
            TransferError: It cannot be had. What was loaded before stays, to be asked for its former role.
        """
        if self._engine is None:
            self._engine = await self.thread.call(lambda: engine_loader(config)(config, **place))
        else:
            if not self.can_switch:
                raise EngineError(f"engine is {config.engine}, which cannot change its role (it has no switch_role)")
            await self._forget_worker()
            self._engine = await self.thread.call(lambda: self._engine.switch_role(config))
        return self._engine

    async def _forget_worker(self) -> None:
        """Give back what the worker before left, above all its ring or staging memory: the plan of the next one counts on it."""
        await self.thread.call(lambda: None)  # the thread still holds what it did last
        gc.unfreeze()  # of what was there when that worker was ready, see `node_runtime.process_setup`
        gc.collect()

    async def rest(self) -> None:
        """Wait until the work that the thread was given is done."""
        await self.thread.call(lambda: None)

    async def close(self) -> None:
        """Give the engine back, and end its thread."""
        if self._engine is not None:
            await self.thread.call(self._engine.close)
        self.thread.close(timeout_s=5.0)

    def _crash(self, error: BaseException) -> None:
        self._loop.call_exception_handler({"message": "a worker thread failed", "exception": error})
