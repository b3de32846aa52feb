"""A real transfer between two processes of this machine, over one transport, measured and its bytes compared.

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
from typing import TYPE_CHECKING, Any, Final

from kvferry.local_cluster.spec import child_environment
from transfer.errors import EngineError

if TYPE_CHECKING:
    from transfer.transport.base import Transport

NUM_BYTES: Final = 64 << 20
TIMEOUT_S: Final = 30.0
_SEED: Final = 7
_WRITTEN: Final = "written\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackResult:
    lane: str
    latency_s: float
    bandwidth_bytes_per_s: float


def measure_loopback(transport: str) -> LoopbackResult:
    """Transfer 64 MiB a few times between two new processes over "shm", "ucx", "nixl" or "cuda_ipc".

    Raises:
        EngineError: The transfer failed.
    """
    command = [sys.executable, "-m", "kvferry.doctor.loopback", "writer", transport]
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


def _open(name: str, *, is_target: bool) -> tuple[Transport, Any]:
    """Return the transport and zeroed memory for it, for `cuda_ipc` on two different GPUs if possible."""
    match name:
        case "ucx":
            from transfer.transport.ucx import UcxTransport

            return UcxTransport(), _host_memory()
        case "shm":
            from transfer.transport.shm import ShmTransport

            return ShmTransport(), _host_memory()
        case "nixl":
            from transfer.transport.nixl import NixlTransport

            return NixlTransport(), _host_memory()
        case _:
            import torch

            from transfer.transport.cuda_ipc import CudaIpcTransport

            device = 1 if is_target and torch.cuda.device_count() > 1 else 0
            return CudaIpcTransport(), torch.zeros(NUM_BYTES, dtype=torch.uint8, device=f"cuda:{device}")


def _host_memory() -> Any:
    """Return shared memory, as the rings of host pools are; every page is touched."""
    import numpy as np

    from transfer.transport.shared_memory import shared_memory

    memory = np.frombuffer(shared_memory(NUM_BYTES), dtype=np.uint8)
    memory[:] = 0
    return memory


def _hash_of(memory: Any) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest((memory.cpu().numpy() if hasattr(memory, "cpu") else memory).data)


async def _write(name: str) -> dict[str, Any]:
    import numpy as np

    from transfer.transport.driver import SessionDriver
    from transfer.transport.probe import ProbePlan, probe_link

    transport, data = _open(name, is_target=False)
    values = np.random.default_rng(_SEED).integers(0, 256, NUM_BYTES, dtype=np.uint8)
    if isinstance(data, np.ndarray):
        data[:] = values
    else:
        import torch

        data.copy_(torch.from_numpy(values))
        torch.cuda.synchronize()
    wanted = _hash_of(values)
    memory = transport.register(data)
    offer = transport.offer()
    command = [sys.executable, "-m", "kvferry.doctor.loopback", "target", name]
    target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert target.stdin is not None and target.stdout is not None
    try:
        target.stdin.write(offer.blob.hex() + "\n")
        target.stdin.flush()
        session = offer.complete(bytes.fromhex(target.stdout.readline()))
        driver = SessionDriver(asyncio.get_running_loop())
        driver.add(session)
        plan = ProbePlan(bulk_bytes=NUM_BYTES)
        probe = await probe_link(driver, session, memory, plan=plan, deadline_s=TIMEOUT_S)
        target.stdin.write(_WRITTEN)
        target.stdin.flush()
        # Two-sided, the target's answers were parts of what it had received: both ends hold the same bytes, or one was damaged.
        found = await asyncio.to_thread(target.stdout.readline)
        driver.remove(session)
        session.close()
    finally:
        target.stdin.close()
        target.wait()
        transport.close()
    if found.strip() != wanted or _hash_of(data) != wanted:
        return {"error": f"the bytes that arrived are not those that were sent ({probe.lane})"}
    return {"lane": probe.lane, "latency_s": probe.latency_s, "bandwidth_bytes_per_s": probe.bandwidth_bytes_per_s}


async def _receive(name: str) -> None:
    from transfer.transport.driver import SessionDriver
    from transfer.transport.probe import ProbePlan, serve_probe

    transport, data = _open(name, is_target=True)
    memory = transport.register(data)
    session, answer = transport.accept(bytes.fromhex(sys.stdin.readline()), memory)
    print(answer.hex(), flush=True)
    driver = SessionDriver(asyncio.get_running_loop())
    driver.add(session)
    plan = ProbePlan(bulk_bytes=NUM_BYTES)
    serving = asyncio.create_task(serve_probe(driver, session, memory, plan=plan, deadline_s=TIMEOUT_S))
    if await asyncio.to_thread(sys.stdin.readline) != _WRITTEN:
        os._exit(1)  # the writer has died
    await serving
    print(_hash_of(data), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends when the writer has closed its session, or has died
    driver.remove(session)
    transport.close()


def _main() -> None:
    role, name = sys.argv[1:]
    if role == "target":
        asyncio.run(_receive(name))
        return
    try:
        content = asyncio.run(_write(name))
    except Exception as error:  # whatever it is, the doctor shows it as one line
        content = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    print(json.dumps(content))


if __name__ == "__main__":
    _main()
