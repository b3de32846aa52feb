"""Send each request at the same time to the prefill and the decode server that MooncakeConnector joins.

    python -m bench.mooncake_proxy --port 8000 --prefill URL --decode URL --bootstrap URL

MooncakeConnector needs the engine id and the bootstrap address of the prefill side, which its proxy must send. `kvferry route`
does not. The requests match vLLM's example (`examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from typing import Any

import aiohttp
from aiohttp import web

from bench.engine_servers import HOST

PATH = "/v1/completions"


class MooncakeProxy:
    """Handle requests for one prefill and one decode server.

    Args:
        session: Client session for both servers.
        prefill, decode: Base URLs of the servers.
        bootstrap: Base URL of the connector's bootstrap server on the prefill side.
    """

    def __init__(self, session: aiohttp.ClientSession, *, prefill: str, bootstrap: str, decode: str) -> None:
        self._session = session
        self._prefill = prefill
        self._bootstrap = bootstrap
        self._decode = decode
        self._engine_id = ""

    async def readyz(self, request: web.Request) -> web.Response:
        """Return 200 once both servers are ready and prefill's engine id is known, otherwise 503."""
        try:
            for url in (f"{self._prefill}/health", f"{self._decode}/health"):
                async with self._session.get(url) as response:
                    response.raise_for_status()
            async with self._session.get(f"{self._bootstrap}/query") as response:
                response.raise_for_status()
                self._engine_id = (await response.json())["0"]["engine_id"]  # "0": the data-parallel rank
        except (aiohttp.ClientError, LookupError, TypeError, ValueError, OSError) as error:
            return web.Response(status=503, text=f"{type(error).__name__}: {error}")
        return web.Response()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Stream decode's answer. If prefill fails, return 500, or end a stream that has begun."""
        body = await request.json()
        transfer_id = f"transfer-{uuid.uuid4()}"
        params = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id}
        params |= {"remote_bootstrap_addr": self._bootstrap, "remote_engine_id": self._engine_id}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._request_prefill(body, transfer_id))
            async with self._session.post(f"{self._decode}{PATH}", json=body | {"kv_transfer_params": params}) as response:
                answer = web.StreamResponse(status=response.status, headers={"Content-Type": response.content_type})
                await answer.prepare(request)
                async for content in response.content.iter_any():
                    await answer.write(content)
        await answer.write_eof()
        return answer

    async def _request_prefill(self, body: dict[str, Any], transfer_id: str) -> None:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        body = {name: value for name, value in body.items() if name != "stream_options"}
        body |= {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
        async with self._session.post(f"{self._prefill}{PATH}", json=body) as response:
            response.raise_for_status()
            await response.read()


async def application(**urls: str) -> web.Application:
    """Return an application with a `MooncakeProxy`, which has these arguments, and a client session."""
    app = web.Application(client_max_size=1 << 26)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
    proxy = MooncakeProxy(session, **urls)
    app.router.add_get("/readyz", proxy.readyz)
    app.router.add_post(PATH, proxy.complete)
    app.on_cleanup.append(lambda _: session.close())
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default=HOST)
    parser.add_argument("--port", type=int, required=True)
    for name in ("prefill", "bootstrap", "decode"):
        parser.add_argument(f"--{name}", metavar="URL", required=True)
    arguments = parser.parse_args()
    urls = {name: getattr(arguments, name) for name in ("prefill", "bootstrap", "decode")}
    web.run_app(
        application(**urls), host=arguments.host, port=arguments.port, print=None, access_log=None, handler_cancellation=True
    )


if __name__ == "__main__":
    main()
