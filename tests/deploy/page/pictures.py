"""Draw docs/images of the status page and of `kvferry top` under load: `python -m tests.deploy.page.pictures FOLDER`.

The cluster has two prefill nodes and a decode node of two ranks on this machine. Chromium draws the page, and textual draws top.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from pathlib import Path

from kvferry.demo.model import make_demo_model
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from kvferry.top.app import TopApp
from kvferry.top.cluster_watch import ClusterWatch
from tests.deploy.page.chromium import tab
from tests.serving.conftest import under_load


async def draw_top(address: str, file: Path) -> None:
    async with ClusterWatch([address]) as watch:
        app = TopApp(watch, every_s=0.5)
        async with app.run_test(size=(160, 34)) as pilot:
            await pilot.pause(5.0)
            svg = app.export_screenshot(title="kvferry top")
    # Remove the reference to an external font, so that viewers use a local font.
    file.write_text(re.sub(r"@font-face\s*\{[^}]*\}", "", svg), encoding="utf-8")


def draw_page(url: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as profile, tab(Path(profile)) as browser:
        for name, width, height, is_dark in (("status-page", 1200, 820, False), ("status-page-phone", 390, 820, True)):
            browser.size(width, height)
            browser.use_dark(is_dark)
            browser.open(url)
            browser.until("document.querySelector('[aria-label=\"link now\"]')")
            time.sleep(4.0)
            browser.picture(folder / f"{name}.png")


async def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as models:
        model = make_demo_model(Path(models) / "demo")
        tier = TierSpec(model=model, pool_tokens=8192)
        decode = TierSpec(model=model, tp_size=2, page_size=32, pool_tokens=8192, settings={"status_page.request_ids": True})
        spec = ClusterSpec(
            prefill=tier,
            decode=decode,
            num_prefill=2,
            ring_bytes=16 << 20,
            heartbeat_s=1.0,
            start_timeout_s=150.0,
        )
        async with LocalCluster(spec) as cluster:
            with under_load(cluster.decode.address):
                await draw_top(cluster.decode.address, folder / "top.svg")
                await asyncio.to_thread(draw_page, f"http://{cluster.decode.http_address}/", folder)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
