"""Draw `kvferry top` with two vLLM servers under load: `.kvferry/vllm-venv/bin/python -m tests.vllm.picture PYTHON FILE`.

PYTHON is an interpreter that has kvferry with textual, for example `.venv/bin/python`. vLLM's environment lacks textual.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.vllm.answers import answers
from tests.vllm.chat_model import make_chat_model
from tests.vllm.commands import route_command, vllm_command, vllm_environment
from tests.vllm.instances import connector, kvferry_addresses
from tests.vllm.prompts import make_prompts
from tests.vllm.servers import Servers

DRAW = """
import asyncio, sys
from pathlib import Path
from tests.deploy.page.pictures import draw_top
asyncio.run(draw_top(sys.argv[1], Path(sys.argv[2])))
"""


def draw(python: str, file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = make_chat_model(Path(folder) / "demo")
        servers = Servers(Path(folder))
        try:
            prefill = servers.start(
                "prefill", vllm_command(model, tp=2, kv_transfer_config=connector("kv_producer")), vllm_environment()
            )
            decode = servers.start(
                "decode",
                vllm_command(model, kv_transfer_config=connector("kv_consumer", {"join_on_request": True})),
                vllm_environment(in_core=True),
            )
            urls = [server.wait_ready().url for server in (prefill, decode)]
            router = servers.start("route", route_command(prefill=urls[:1], decode=urls[1:]), {}).wait_ready()
            prompts = list(make_prompts(model).values())
            asyncio.run(_draw_under_load(router.url, prompts, [python, "-c", DRAW, kvferry_addresses(decode)[0], str(file)]))
        finally:
            servers.close()


async def _draw_under_load(url: str, prompts: list[str], command: list[str]) -> None:
    await answers(url, prompts[:2])  # the two servers join at the first prompt
    load = asyncio.create_task(answers(url, prompts * 100, at_once=8))
    drawing = await asyncio.create_subprocess_exec(*command)
    code = await drawing.wait()
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    assert code == 0, "drawing failed"


if __name__ == "__main__":
    draw(sys.argv[1], Path(sys.argv[2]).resolve())
