"""`kvferry top` without a cluster: what its nodes cannot be made to do at the right moment."""

from __future__ import annotations

import asyncio
from typing import cast

from kvferry.cluster_view import ClusterView
from kvferry.cluster_watch import ClusterWatch
from kvferry.top_app import TopApp


class Restless:
    """A watch that is done with its look at once, so that one is always about to be shown."""

    async def look(self) -> ClusterView:
        await asyncio.sleep(0)
        return ClusterView(nodes=())


async def test_it_ends_in_the_middle_of_a_look() -> None:
    app = TopApp(cast(ClusterWatch, Restless()), every_s=0.0)
    async with app.run_test() as pilot:
        while app.num_looks < 3:
            await pilot.pause(0.01)
    looks = app.num_looks
    for _ in range(20):
        await asyncio.sleep(0)
    assert app.num_looks == looks and not app.alerts
