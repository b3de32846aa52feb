"""A real transfer between two processes of this machine, over the `ucx` transport, measured and its bytes compared.

Run as a program it is the writer, starts the target as another process, and prints one line of JSON: the fields of
`LoopbackResult`, or ``{"error": ...}``. It is a process of its own because UCX may end the one that it runs in.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final

from kvferry.cluster_spec import child_environment
from transfer.errors import EngineError

NUM_BYTES: Final = 64 << 20
TIMEOUT_S: Final = 30.0
_SEED: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackResult:
    """What was measured."""

    lane: str
    latency_s: float
    bandwidth_bytes_per_s: float


def measure_loopback() -> LoopbackResult:
    """Transfer 64 MiB a few times between two new processes.

    Raises:
        EngineError: It could not be done; one line says why.
    """
    command = [sys.executable, "-m", "kvferry.loopback", "writer"]
    environment = child_environment() | {"UCX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise EngineError(f"the transfer did not end within {TIMEOUT_S:g} s") from None
    finally:
        if process.poll() is None:
            process.kill()  # the target sees the end of its input, and ends
            process.communicate()
    lines = output.decode().splitlines()
    if process.returncode or not lines:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise EngineError(f"the writer ended with exit code {process.returncode}: {' '.join(last)}")
    content = json.loads(lines[-1])
    if "error" in content:
        raise EngineError(content["error"])
    return LoopbackResult(**content)


async def _write() -> dict[str, Any]:
    import numpy as np
    import xxhash

    from transfer.transport.driver import SessionDriver
    from transfer.transport.probe import ProbePlan, probe_link
    from transfer.transport.ucx import UcxTransport

    data = np.random.default_rng(_SEED).integers(0, 256, NUM_BYTES, dtype=np.uint8)
    wanted = xxhash.xxh3_64_hexdigest(data.data)
    transport = UcxTransport()
    memory = transport.register(data)
    offer = transport.offer()
    target = subprocess.Popen(
        [sys.executable, "-m", "kvferry.loopback", "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert target.stdin is not None and target.stdout is not None
    try:
        target.stdin.write(offer.blob.hex() + "\n")
        target.stdin.flush()
        session = offer.complete(bytes.fromhex(target.stdout.readline()))
        driver = SessionDriver(asyncio.get_running_loop())
        driver.add(session)
        probe = await probe_link(driver, session, memory, plan=ProbePlan(bulk_bytes=NUM_BYTES), deadline_s=TIMEOUT_S)
        # The target's answers were parts of what it had received, so both ends now hold the same bytes, or one was damaged.
        found = await asyncio.to_thread(target.stdout.readline)
        driver.remove(session)
        session.close()
    finally:
        target.stdin.close()
        target.wait()
        transport.close()
    if found.strip() != wanted or xxhash.xxh3_64_hexdigest(data.data) != wanted:
        return {"error": f"the bytes that arrived are not those that were sent ({probe.lane})"}
    return {"lane": probe.lane, "latency_s": probe.latency_s, "bandwidth_bytes_per_s": probe.bandwidth_bytes_per_s}


async def _receive() -> None:
    import numpy as np
    import xxhash

    from transfer.transport.driver import SessionDriver
    from transfer.transport.probe import ProbePlan, serve_probe
    from transfer.transport.ucx import UcxTransport

    data = np.zeros(NUM_BYTES, dtype=np.uint8)
    transport = UcxTransport()
    memory = transport.register(data)
    session, answer = transport.accept(bytes.fromhex(sys.stdin.readline()), memory)
    print(answer.hex(), flush=True)
    driver = SessionDriver(asyncio.get_running_loop())
    driver.add(session)
    serving = asyncio.create_task(
        serve_probe(driver, session, memory, plan=ProbePlan(bulk_bytes=NUM_BYTES), deadline_s=TIMEOUT_S)
    )
    waiting = asyncio.create_task(asyncio.to_thread(sys.stdin.read))  # ends when the writer has what it wants, or has died
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        os._exit(1)
    await serving
    print(xxhash.xxh3_64_hexdigest(data.data), flush=True)
    await waiting
    driver.remove(session)
    transport.close()


def _main() -> None:
    if sys.argv[1:] == ["target"]:
        asyncio.run(_receive())
        return
    try:
        content = asyncio.run(_write())
    except Exception as error:  # whatever it is, the doctor shows it as one line
        content = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    print(json.dumps(content))


if __name__ == "__main__":
    _main()
