"""One pair of processes over each transport: bytes, any order, a new session, and an end without a word.

tests/cluster/links has every lane, and ends that are killed or frozen.
"""

from __future__ import annotations

import pytest

from tests.transport.ends import Ends, exchange
from tests.transport.mapped_ends import Place, attach, remotes
from tests.transport.payload import rng
from transfer.errors import ConfigError
from transfer.transport.inproc import InprocHub, InprocTransport
from transfer.transport.peer import ProcessIdentity

SIZE = 8 << 20


@pytest.mark.parametrize(("kind", "lane"), [("ucx-auto", "ucx/shm"), ("nixl-auto", "nixl/shm")])
def test_a_session_between_processes(kind: str, lane: str, capfd: pytest.CaptureFixture[str]) -> None:
    ends = Ends(kind, "target", SIZE)
    assert ends.session.lane == lane and not ends.session.obstacle
    exchange(ends)
    if not ends.is_one_sided:  # the probe writes back
        ends.peer.do("expect", begin=100, end=30_100, key=2)
        ends.drive(ends.session.write(ends.memory, rng(0, 30_000), rng(0, 30_000), 2))
        assert ends.peer.do("wait", keys=[2], deadline_s=60) == [30_000]
    ends.peer.do("close")
    ends.session.close()
    assert ends.close() == (0, "")
    assert capfd.readouterr() == ("", "")


def test_a_session_between_processes_over_cuda_ipc() -> None:
    """On the twin of CUDA."""
    with remotes() as make:
        writer, target = (make(Place(is_gpu=False, device=device), num_bytes=SIZE) for device in (0, 1))
        for seed in (5, 6):
            assert attach(writer, target) == "cuda_ipc/fused"
            writer.do("fill", seed=seed)
            target.do("stamp", value=0xA5)
            writer.do("write", begin=8, end=SIZE - 64, target_begin=40, key=1)
            assert writer.do("wait", key=1, seconds=60) == "done"
            assert target.do("holds", begin=40, end=SIZE - 32, seed=seed, source_begin=8, around=0xA5)
            target.do("stamp", value=0x5A)
            assert writer.do("store", begin=8, end=5000, target_begin=0)
            assert target.do("holds", begin=0, end=4992, seed=seed, source_begin=8, around=0x5A)
            writer.do("close")
            target.do("close")
            assert target.do("is_over_within", seconds=60)


def test_inproc_across_processes_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    own, there = ProcessIdentity.own(), InprocTransport(InprocHub())
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: own.pid + 1)
        blob = there.offer().blob
    transport = InprocTransport(InprocHub())
    with pytest.raises(ConfigError) as caught:
        transport.accept(blob, transport.register(bytearray(8)))
    assert str(caught.value) == (
        f"transport inproc joins two ends of one process; writer runs in pid {own.pid + 1} on host {own.host}, "
        f"target in pid {own.pid}: choose transport: ucx"
    )
