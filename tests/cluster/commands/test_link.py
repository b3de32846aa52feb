"""The link's benchmark: what can run on this machine runs, what cannot is named, and every ratio has its yardstick."""

from __future__ import annotations

import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from bench import link
from bench.link_plan import steps
from bench.llama70b import TOKEN_BYTES, Gather
from bench.pair import Devices, PairFailed, run_pair
from transfer.kernels import reference
from transfer.layout import Span

CPU = Devices.of("cpu")
SMALL = 512 << 10


def small_run(*lanes: str) -> link.Run:
    plan = steps(device_type="cpu", max_bytes=SMALL, is_quick=True)
    return link.Run(devices=CPU, plan=plan, is_quick=True, spin_s=0.0, lanes=lanes)


def test_plan_has_every_size_up_to_the_largest() -> None:
    plan = steps(device_type="cuda", max_bytes=1 << 30, is_quick=False)
    assert {step.num_bytes for step in plan if step.in_flight == 1} >= {4 << 10, 64 << 20, 1 << 30}
    assert max(step.num_bytes * step.in_flight for step in plan) == 1 << 30
    assert all(step.repetitions >= 7 for step in plan)


def test_ucx_is_held_against_its_plain_use() -> None:
    report, is_failed = link.measure(small_run("copy", "ucx plain", "ucx/shm"), num_passes=2)
    assert not is_failed
    rows = {(row.case, row.what): row for row in report.rows}
    for size in ("4 KiB", "64 KiB", "512 KiB"):
        assert rows[size, "kvferry ucx/shm"].ratio_to == f"UCXX tag send, plain ({size})"
        assert rows[size, "UCXX tag send, plain"].ratio_to == f"memcpy, one thread ({size})"
        assert rows[size, "kvferry ucx/shm, with answer"].ratio_to == f"memcpy, one thread ({size})"
    assert rows["4 KiB, 8 in flight", "kvferry ucx/shm"].ratio_to == "UCXX tag send, plain (4 KiB)"
    assert len(rows["4 KiB", "kvferry ucx/shm"].samples_s) == 2 * 3, "two passes of three"
    assert report.facts["carried by"] == {"kvferry ucx/shm": "ucx/shm"}
    assert "not measured" not in report.facts


@pytest.mark.parametrize("name", ["nixl plain", "nixl"])
def test_nixl_is_measured_or_named(name: str) -> None:
    report, is_failed = link.measure(small_run(name), num_passes=1)
    assert not is_failed
    if all(find_spec(package) is None for package in ("nixl_cu13", "nixl_cu12", "nixl")):
        assert "nixl" in str(report.facts["not measured"])
    else:
        assert {"4 KiB", "512 KiB"} <= {row.case for row in report.rows}


def test_what_needs_two_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(PairFailed, match="torch sees no CUDA device"):
        Devices.of("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert str(Devices.of("cuda")) == "two processes on one GPU"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Devices.of("cuda").target == "cuda:1"
    assert Devices.of("cuda", is_one_gpu=True).are_same


def test_what_the_fused_gather_moves() -> None:
    job = Gather.of(32, "cpu")
    assert job.plan.num_wire_bytes == 32 * TOKEN_BYTES
    out = torch.zeros(32 * TOKEN_BYTES, dtype=torch.uint8)
    job.plan.gather(job.pages, out)
    expected = torch.zeros_like(out)
    plan = reference.ReferenceCopier(job.pool, heads=Span(begin=0, end=2), wire_dtype=job.pool.layout.dtype).plan(
        job.plan.buffers
    )
    plan.gather(job.pages, expected)
    assert torch.equal(out, expected)
    assert out.any()


def double(pipe: Connection, device: str, fault: str) -> Any:
    if fault == "writer":
        raise ValueError("no ring")
    pipe.send(21)
    return pipe.recv()


def answer(pipe: Connection, device: str, fault: str) -> None:
    if fault == "target":
        raise ValueError("no pool")
    if fault == "hang":
        time.sleep(600)
    pipe.send(2 * pipe.recv())


def test_a_pair_returns_what_the_writer_does() -> None:
    assert run_pair(double, answer, "", devices=CPU, timeout_s=60) == 42


@pytest.mark.parametrize(
    ("fault", "timeout_s", "message"),
    [("writer", 60, "writer failed with ValueError: no ring"), ("target", 60, "ValueError: no pool"), ("hang", 5, "within 5 s")],
)
def test_a_pair_that_fails_says_why_and_leaves_nothing(fault: str, timeout_s: float, message: str) -> None:
    with pytest.raises(PairFailed, match=message):
        run_pair(double, answer, fault, devices=CPU, timeout_s=timeout_s)
