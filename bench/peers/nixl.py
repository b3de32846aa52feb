"""NIXL through its own plain API: one bulk write, and the many small ones of an engine that sends without staging.

The target does nothing but exist: NIXL's progress thread serves it. In host memory there is no such thread: it spins, one in each
process would take both cores of a small machine from the copy, and the target just looks in now and then.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from torch import Tensor

from bench.link_plan import Samples, Step
from bench.pair import bytes_on, synchronize

_DEADLINE_S = 60.0
_LOOK_IN_S = 0.0005


class NixlEnd:
    """An agent and one registered memory.

    Args:
        memory: uint8, on either device.

    Raises:
        ImportError: There is no NIXL.
    """

    def __init__(self, name: str, memory: Tensor) -> None:
        api = _api()
        config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=memory.is_cuda)
        self._agent: Any = api.nixl_agent(name, config)
        self._memory = memory
        self._registered = self._agent.register_memory(memory)
        self._peer = ""
        self._peer_address = (0, 0)

    @property
    def blob(self) -> tuple[bytes, int, int]:
        """For the other end's `meet`."""
        return self._agent.get_agent_metadata(), self._memory.data_ptr(), self._device

    @property
    def _device(self) -> int:
        return max(self._memory.get_device(), 0)

    @property
    def _kind(self) -> str:
        return "VRAM" if self._memory.is_cuda else "DRAM"

    def meet(self, blob: tuple[bytes, int, int]) -> None:
        metadata, *self._peer_address = blob  # type: ignore[assignment]
        name = self._agent.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def bulk(self, num_bytes: int) -> Callable[[], None]:
        """A call that writes the first bytes of this end's memory to the first of the other's; returns when NIXL says DONE."""
        request = self._bulk_request(num_bytes, b"")
        return lambda: self._move(request)

    def _bulk_request(self, num_bytes: int, note: bytes) -> Any:
        address, device = self._peer_address
        local = self._agent.get_xfer_descs(np.array([[self._memory.data_ptr(), num_bytes, self._device]], np.uint64), self._kind)
        remote = self._agent.get_xfer_descs(np.array([[address, num_bytes, device]], np.uint64), self._kind)
        return self._agent.initialize_xfer("WRITE", local, remote, self._peer, note)

    def write_once(self, num_bytes: int, note: bytes) -> None:
        """As `bulk`, but with a request made for this write, as engines make it, and a note that comes to the target with it."""
        request = self._bulk_request(num_bytes, note)
        self._move(request)
        self._agent.release_xfer_handle(request)

    def wait_for_note(self) -> None:
        """Returns when a note has come."""
        while not self._agent.get_new_notifs():
            os.sched_yield()

    def pieces(self, count: int, num_bytes: int, *, seed: int) -> Callable[[], None]:
        """A call that writes `count` pieces of `num_bytes`, places in random order on both sides: one descriptor each.

        Both lists are prepared once, as engines do; the request is made of them for each call.
        """
        places = len(self._memory) // num_bytes
        if places < count:
            raise ValueError(f"{count} pieces of {num_bytes} bytes do not fit {len(self._memory)} bytes of memory")
        order = np.random.default_rng(seed)
        local = self._prepared(
            "NIXL_INIT_AGENT", self._memory.data_ptr(), self._device, order.permutation(places)[:count], num_bytes
        )
        address, device = self._peer_address
        remote = self._prepared(self._peer, address, device, order.permutation(places)[:count], num_bytes)
        indices = np.arange(count, dtype=np.int32)

        def write() -> None:
            request = self._agent.make_prepped_xfer("WRITE", local, indices, remote, indices)
            self._move(request)
            self._agent.release_xfer_handle(request)

        return write

    def _prepared(self, agent: str, address: int, device: int, places: np.ndarray, num_bytes: int) -> Any:
        descs = np.empty((len(places), 3), np.uint64)
        descs[:, 0] = address + places.astype(np.uint64) * np.uint64(num_bytes)
        descs[:, 1], descs[:, 2] = num_bytes, device
        return self._agent.prep_xfer_dlist(agent, self._agent.get_xfer_descs(descs, self._kind))

    def _move(self, request: Any) -> None:
        state = self._agent.transfer(request)
        ends_s = time.monotonic() + _DEADLINE_S
        while state == "PROC":
            os.sched_yield()  # where cores are few, a poller would keep NIXL's own threads from theirs
            state = self._agent.check_xfer_state(request)
            if time.monotonic() > ends_s:
                raise TimeoutError(f"a NIXL write is not done after {_DEADLINE_S:.0f} s")
        if state != "DONE":
            raise RuntimeError(f"a NIXL write ended with {state}")

    def look_in(self) -> None:
        """Progress of an end without a thread."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)
        self._agent = None
        gc.collect()


def _api() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for package in ("nixl_cu13", "nixl_cu12", "nixl"):
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            failed = error
    raise failed


def write(pipe: Connection, device: str, plan: Sequence[Step], pieces: Sequence[tuple[int, int]]) -> dict[str, Samples]:
    """The writer: seconds of each bulk write by step, and of each list of (count, bytes) by its name."""
    memory_bytes = max([step.num_bytes for step in plan] + [2 * count * size for count, size in pieces])
    memory = bytes_on(device, memory_bytes)
    synchronize(device)
    end = NixlEnd("writer", memory)
    pipe.send((memory_bytes, end.blob))
    end.meet(pipe.recv())
    found: dict[str, Samples] = {}
    for step in plan:
        found[step.name] = step.sample(end.bulk(step.num_bytes))
    for count, size in pieces:
        step = Step(num_bytes=count * size, repetitions=5)
        found[pieces_name(count, size)] = step.sample(end.pieces(count, size, seed=1))
    pipe.send("done")
    end.close()
    return found


def serve(pipe: Connection, device: str, plan: Sequence[Step], pieces: Sequence[tuple[int, int]]) -> None:
    memory_bytes, blob = pipe.recv()
    memory = bytes_on(device, memory_bytes)
    synchronize(device)
    end = NixlEnd("target", memory)
    end.meet(blob)
    pipe.send(end.blob)
    while not pipe.poll(_LOOK_IN_S):
        end.look_in()
    end.close()


def pieces_name(count: int, num_bytes: int) -> str:
    return f"{count:,} descriptors of {num_bytes:,} B"
