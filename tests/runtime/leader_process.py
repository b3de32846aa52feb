"""A leader that starts two ranks, prints their pids and waits to be killed: ``python -m tests.runtime.leader_process FOLDER``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from node_runtime.supervisor import RankSide, RankSupervisor
from tests.runtime import rank_entries
from tests.runtime.instances import prefill_config


async def main(folder: Path) -> None:
    config = prefill_config(folder, parallel={"tp_size": 2})
    side = RankSide(config=config, codec=rank_entries.CODEC, on_message=lambda rank, message: None)
    supervisor = RankSupervisor(side, rank_entries.obedient, preload=["tests.runtime.preloaded"], on_lost=lambda reason: None)
    await supervisor.start()
    print(*supervisor.pids, flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
