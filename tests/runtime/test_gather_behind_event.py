"""Rule 13 with real copies: what a device has not written yet is not gathered."""

from __future__ import annotations

import threading

import torch

from examples.one_process import TwoTiers
from tests.runtime.instances import until
from transfer.layout import DType, KVLayout, Shard

LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)


class DeviceWork:
    """Work on a device that lags behind, and the event after it: the KV is in the pool only once somebody has waited."""

    def __init__(self, tiers: TwoTiers, num_tokens: int) -> None:
        self.pages = tiers.senders[0].pages
        self.slots = self.pages.slots("a", num_tokens)
        self.kv = torch.arange(1, 1 + num_tokens * 8, dtype=torch.float16).view(num_tokens, 2, 4)
        self.waited_on = ""

    def synchronize(self) -> None:
        self.waited_on = threading.current_thread().name
        self.pages.pool.write(0, self.slots, self.kv, -self.kv)


async def test_the_gather_waits_for_the_devices_event_and_not_on_the_owners_loop() -> None:
    tiers = TwoTiers(LAYOUT, Shard(page_size=16), Shard(page_size=16), is_one_sided=True)
    try:
        tiers.start("a", 20)
        event = DeviceWork(tiers, 20)
        tiers.senders[0].loop.chunk_computed("a", 0, event)
        await until(lambda: "a" in tiers.receivers[0].complete)
        receiver = tiers.receivers[0].pages
        found_k, found_v = receiver.pool.read(0, receiver.slots("a", 20))
        assert torch.equal(found_k, event.kv) and torch.equal(found_v, -event.kv)
        assert event.waited_on not in ("", threading.main_thread().name)
    finally:
        tiers.close()
