"""SGLang servers for `bench.engines`: one alone, or a pair that is joined by a disaggregation backend.

Setups: `one` is one server with the TP degree of the decode side. `nixl` and `kvferry` are a prefill and a decode server, joined
by SGLang's NIXL backend or by kvferry with its defaults. `staging` is `nixl` with SGLang's staging buffers for different TP
degrees. The client sends each request to both servers, as SGLang's router does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from bench.engine_load import Answer, Load, run_clients
from bench.engine_servers import HOST, Setup, free_port

_FIRST_ROOM: Final = 1 << 40
SETUPS: Final = ("one", "nixl", "staging", "kvferry")
_ENVIRONMENT: Final = {"kvferry": {"KVFERRY_TLS__INSECURE": "1"}, "staging": {"SGLANG_DISAGG_STAGING_BUFFER": "1"}}


@dataclass(slots=True, kw_only=True)
class SglangSetup(Setup):
    """A `Setup` of SGLang servers."""

    _bootstrap_port: int = 0
    _rooms: itertools.count[int] = field(default_factory=lambda: itertools.count(_FIRST_ROOM))

    def start(self) -> None:
        """Start all servers without waiting for them."""
        self._begin_s = time.monotonic()
        serving = self.serving
        if self.name == "one":
            self._start_sglang("0", serving.decode_tp)
            return
        self._bootstrap_port = free_port()
        for role, tp_size in (("prefill", serving.prefill_tp), ("decode", serving.decode_tp)):
            backend = "kvferry" if self.name == "kvferry" else "nixl"
            arguments = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", backend]
            self._start_sglang(role, tp_size, [*arguments, "--disaggregation-bootstrap-port", str(self._bootstrap_port)])

    def num_preemptions(self) -> int:
        """Return 0: SGLang's metrics are off."""
        return 0

    async def send(self, prompts: Sequence[Sequence[int]], **options: Any) -> Load:
        """Send prompts as `Setup.send` does, to all servers of the setup. Answers always have token ids, and no text."""

        async def ask(session: aiohttp.ClientSession, index: int, answer: Answer) -> None:
            body = self.body(prompts[index], options["output_tokens"])
            # The last server decodes. Only its answer counts.
            others = [Answer(prompt_tokens=answer.prompt_tokens) for _ in self.urls[1:]]
            asked = zip(self.urls, [*others, answer], strict=True)
            await asyncio.gather(*(_ask(session, url, body, each) for url, each in asked))

        return await run_clients(prompts, ask, in_flight=options["in_flight"], patience_s=options.get("patience_s", {}))

    def body(self, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
        """Return the body of one request, which all servers of the setup receive."""
        sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        if self.name == "one":
            return body
        return body | {"bootstrap_host": HOST, "bootstrap_port": self._bootstrap_port, "bootstrap_room": next(self._rooms)}

    def _start_sglang(self, role: str, tp_size: int, arguments: Sequence[str] = ()) -> None:
        url = f"http://{HOST}:{(port := free_port())}"
        self.urls.append(url)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.serving.model), "--host", HOST]
        command += ["--port", str(port), "--tp-size", str(tp_size), "--dist-init-addr", f"{HOST}:{free_port()}"]
        command += ["--nccl-port", str(free_port()), "--skip-server-warmup", *arguments, *self.serving.arguments]
        self._start(role, command, ready_url=f"{url}/model_info", environment=_ENVIRONMENT.get(self.name, {}))


async def _ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], answer: Answer) -> None:
    begin_s = last_s = time.perf_counter()
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                content = json.loads(line[6:])
                if "error" in content:
                    answer.error = str(content["error"])[:300]
                if not (found := content.get("output_ids")):
                    continue
                now_s = time.perf_counter()
                if answer.ttft_s:
                    answer.intervals_s.append(now_s - last_s)
                else:
                    answer.ttft_s = now_s - begin_s
                last_s = now_s
                answer.num_tokens = content["meta_info"]["completion_tokens"]
                is_whole = len(found) == answer.num_tokens  # otherwise, the ids are those since the last chunk
                answer.token_ids = found if is_whole else answer.token_ids + found
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.end_to_end_s = time.perf_counter() - begin_s
        wanted = body["sampling_params"]["max_new_tokens"]
        if not answer.error and answer.num_tokens != wanted:
            answer.error = f"the answer has {answer.num_tokens} tokens instead of {wanted}"
