"""`python -m tests.cluster.faults.faulty_node ROLE serve ...`: the real daemon, with faults of messages.

The product runs unchanged, over its real sockets. Only in the ranks, between the owner's loop and its channels, control
messages of both directions and watermarks can be lost, repeated, or held back so that later ones overtake them. With an empty
file, all messages pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from node_runtime.rank_process import run_rank
from node_runtime.rank_worker import RankSpec

FAULTS_FILE: Final = "CHAOS_FAULTS_FILE"
"""Variable with the name of a file: the faults in JSON. Faults that happened are appended to a file with the suffix ".done"."""

_READ_EVERY_S: Final = 0.02


class Faults:
    """The present faults from the file: shares in [0, 1] of messages to lose, to repeat and to hold back, and for how long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._random = random.Random(os.getpid())
        self._read_s = 0.0
        self._told: Mapping[str, float] = {}

    def delays_s(self, kind: str) -> Sequence[float]:
        """Return the delay in seconds of each delivery of a message: () is lost, (0.0, 0.0) is repeated."""
        now_s = time.monotonic()
        if now_s - self._read_s > _READ_EVERY_S:
            self._read_s = now_s
            with contextlib.suppress(FileNotFoundError):
                self._told = json.loads(self._path.read_text() or "{}").get(kind, {})
        if not self._told:
            return (0.0,)
        if self._random.random() < self._told.get("lose", 0.0):
            self._count("L")
            return ()
        times = 1
        if self._random.random() < self._told.get("repeat", 0.0):
            self._count("R")
            times = 2
        delays = [0.0] * times
        if self._random.random() < self._told.get("hold", 0.0):
            self._count("H")
            delays[-1] = self._random.uniform(0.0, self._told.get("hold_s", 0.3))
        return delays

    def _count(self, what: str) -> None:
        with open(f"{self._path}.done", "a") as file:
            file.write(what)

    def pass_on(self, kind: str, hand_on: Callable[[], object]) -> None:
        """Deliver a message as often, and as late, as the file says."""
        for delay_s in self.delays_s(kind):
            if delay_s:
                asyncio.get_running_loop().call_later(delay_s, _late, hand_on)
            else:
                hand_on()


def _late(hand_on: Callable[[], object]) -> None:
    from transfer.errors import TransportClosed

    with contextlib.suppress(TransportClosed):  # the channel's end was not held back
        hand_on()


def _disturb_decode(faults: Faults) -> None:
    """Disturb control messages of both directions at the control channel's server."""
    attach: Any = importlib.import_module("transfer.receive.attach")

    class FaultyServer(attach.SessionControlServer):  # type: ignore[misc]
        def send(self, peer: int, payload: bytes) -> bool:
            faults.pass_on("control", lambda: super(FaultyServer, self).send(peer, payload))
            return True

        def watch(self, loop: asyncio.AbstractEventLoop, on_received: Callable[[Any], None]) -> None:
            super().watch(loop, lambda received: faults.pass_on("control", lambda: on_received(received)))

    attach.SessionControlServer = FaultyServer


def _disturb_prefill(faults: Faults) -> None:
    """Disturb watermarks on their way to the sender."""
    attach: Any = importlib.import_module("transfer.send.attach")

    class FaultyClient(attach.TransferControlClient):  # type: ignore[misc]
        def watch(self, session_id: int, *, on_watermark: Callable[[Any], None], **rest: Any) -> Any:
            def disturbed(watermark: Any) -> None:
                faults.pass_on("watermark", lambda: on_watermark(watermark))

            return super().watch(session_id, on_watermark=disturbed, **rest)

    attach.TransferControlClient = FaultyClient


def run_faulty_rank(spec: RankSpec) -> None:
    """Run a rank whose messages can be disturbed."""
    disturb = {"prefill": _disturb_prefill, "decode": _disturb_decode}[spec.config.role]
    disturb(Faults(Path(os.environ[FAULTS_FILE])))
    run_rank(spec)


def main(role: str) -> None:
    """Run the role's daemon with such ranks."""
    # By the name under which the processes of the ranks import it: this module is __main__ here.
    faulty = importlib.import_module("tests.cluster.faults.faulty_node")
    leader_service: Any = importlib.import_module("node_runtime.leader_service")
    leader_service.run_rank = faulty.run_faulty_rank
    importlib.import_module(f"{role}_node.command").app()


if __name__ == "__main__":
    main(sys.argv.pop(1))
