"""Real SGLang servers on the CPU, started by their command line; see README.md. Every process is ended by its id."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp
import pytest

from bench.engine_servers import free_port as unused_port
from tests.free_port import free_port
from tests.samples import sample

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".kvferry" / "sglang-venv" / "bin" / "python"))
START_S = 400.0  # a minute for both engines on two quiet cores
ANSWER_S = 120.0
END_S = 20.0

_rooms = itertools.count(1 << 40)


@dataclass(kw_only=True)
class Cut:
    """How one engine is run."""

    tp_size: int = 1
    pp_size: int = 1
    page_size: int = 1
    kv_dtype: str = "auto"
    chunk_tokens: int = 128
    is_caching: bool = False  # keeps prefixes for later prompts
    optimistic_attempts: int = 0  # value of --optimistic-prefill-attempts

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size


@dataclass(kw_only=True)
class Engine:
    """A process group of SGLang."""

    role: str
    model: Path
    cut: Cut
    folder: Path
    port: int = 0
    bootstrap_port: int = 0
    metrics_port: int = 0
    process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = field(default=None, repr=False)
    _ports: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / f"{self.role}.log").read_text(encoding="utf-8", errors="replace")

    def start(self) -> Self:
        """Start it and do not wait for it."""
        self.port, self.bootstrap_port, self.metrics_port = (self._ports.enter_context(free_port()) for _ in range(3))
        dist_port, nccl_port = unused_port(), unused_port()  # SGLang itself opens them, so they cannot be held
        cut = self.cut
        command = [
            str(PYTHON), "-m", "sglang.launch_server",
            "--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(self.port),
            "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup",
            "--max-total-tokens", "8192", "--context-length", "1024", "--max-running-requests", "16",
            "--mem-fraction-static", "0.2",
            "--chunked-prefill-size", str(cut.chunk_tokens), "--page-size", str(cut.page_size), "--tp-size", str(cut.tp_size),
            "--pp-size", str(cut.pp_size), "--kv-cache-dtype", cut.kv_dtype,
            "--dist-init-addr", f"127.0.0.1:{dist_port}", "--nccl-port", str(nccl_port),
        ]  # fmt: skip
        if not cut.is_caching:
            command.append("--disable-radix-cache")
        elif self.role == "decode":
            command.append("--disaggregation-decode-enable-radix-cache")
        if self.role != "single":
            command += ["--disaggregation-mode", self.role, "--disaggregation-transfer-backend", "kvferry"]
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        if cut.optimistic_attempts:
            command += ["--optimistic-prefill-attempts", str(cut.optimistic_attempts)]
        if self.role == "decode":
            command += ["--hicache-ratio", "1"]  # of itself SGLang wants 10 GiB of the host to stay free, for a pool of 100 MB
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        path = [str(Path(__file__).parent / "stand_ins"), environment.get("PYTHONPATH", "")]
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "KVFERRY_TLS__INSECURE": "1",
            "KVFERRY_HEARTBEAT__INTERVAL_S": "3",  # a loaded machine may not run a rank for seconds; a dead one's sockets close
            "KVFERRY_SERVER__HTTP_PORT": str(self.metrics_port),
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(cut.num_ranks)),
            "OVERHEAD_FILE": str(self.folder / f"{self.role}-overhead"),
            "HF_HUB_OFFLINE": "1",
        }
        self._log = (self.folder / f"{self.role}.log").open("wb")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, cwd=self.folder, start_new_session=True
        )
        return self

    def wait_until_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urlopen(f"{self.url}/model_info", timeout=5):
                    return
            except (URLError, OSError):
                pass
            assert self.process.poll() is None, f"{self.role} has ended:\n{self.log[-6000:]}"
            assert time.monotonic() < deadline, f"{self.role} is not ready:\n{self.log[-6000:]}"
            time.sleep(0.5)

    def metric(self, name: str) -> float:
        """Return the sum of a metric of kvferry over all ranks."""
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        assert f"\n{name}" in page, f"{name} is not among the metrics of kvferry"
        return sample(page, name)

    def overhead(self) -> dict[str, dict[str, float]]:
        """What its first scheduler has spent so far, see stand_ins/overhead.py."""
        texts = [file.read_text(encoding="utf-8") for file in self.folder.glob(f"{self.role}-overhead-*.json")]
        found = [json.loads(text) for text in texts if text]
        return max(found, key=lambda one: float(one["numbers"]["steps"]))

    async def generate(self, session: aiohttp.ClientSession, token_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """Answer of an engine that is no part of a pair."""
        return await post(session, self, request_body(token_ids, max_new_tokens))

    def kill(self) -> None:
        """All of its processes, at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # the group is its own
            self.process.wait(END_S)
        if self._log is not None:
            self._log.close()
        self._ports.close()


@dataclass(kw_only=True)
class Pair:
    """A prefill engine and a decode engine."""

    prefill: Engine
    decode: Engine

    def body(self, token_ids: Sequence[int], room: int, max_new_tokens: int) -> dict[str, Any]:
        names = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port, "bootstrap_room": room}
        return request_body(token_ids, max_new_tokens) | names

    async def generate(self, session: aiohttp.ClientSession, token_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """Decode's answer, of a request that is given to both engines, as routers do it."""
        body = self.body(token_ids, next(_rooms), max_new_tokens)
        answers = await asyncio.gather(*(post(session, engine, body) for engine in (self.prefill, self.decode)))
        return answers[1]

    async def settled(self) -> None:
        """Until kvferry keeps nothing of any request on either side."""
        deadline = time.monotonic() + 60.0
        left: dict[str, float] = {}
        while time.monotonic() < deadline:
            alive = [one for one in (self.prefill, self.decode) if one.process is not None and one.process.poll() is None]
            left = {one.role: one.metric("kvferry_rank_requests") + one.metric("kvferry_queued_requests") for one in alive}
            if not any(left.values()):
                return
            await asyncio.sleep(0.2)
        raise AssertionError(f"requests are left: {left}")


async def post(session: aiohttp.ClientSession, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with session.post(f"{engine.url}/generate", json=body, timeout=timeout) as answer:
        text = await answer.text()
        return {"status": answer.status, **(json.loads(text) if text.startswith("{") else {"text": text})}


def request_body(token_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": list(token_ids), "sampling_params": sampling}


@contextlib.contextmanager
def alone(model: Path, folder: Path, *, cut: Cut) -> Iterator[Engine]:
    """One engine without kvferry, ready; killed at the end."""
    engine = Engine(role="single", model=model, cut=cut, folder=folder)
    try:
        engine.start().wait_until_ready()
        yield engine
    finally:
        engine.kill()


@contextlib.contextmanager
def running(model: Path, folder: Path, *, prefill: Cut, decode: Cut) -> Iterator[Pair]:
    """Both engines, ready; killed at the end, and their logs are shown if something failed."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is not there: bash tests/sglang/setup.sh makes it, or SGLANG_PYTHON names another")
    pair = Pair(
        prefill=Engine(role="prefill", model=model, cut=prefill, folder=folder),
        decode=Engine(role="decode", model=model, cut=decode, folder=folder),
    )
    try:
        pair.prefill.start()
        pair.decode.start()
        pair.prefill.wait_until_ready()
        pair.decode.wait_until_ready()
        yield pair
    finally:
        for engine in (pair.prefill, pair.decode):
            engine.kill()
            if engine.process is not None:
                print(f"--- {engine.role}", engine.log[-8000:], sep="\n")
