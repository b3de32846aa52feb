"""What `make test-rdma` makes of its guest, with a shell in QEMU's place; and that its witness objects."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.rdma import boot, witness

UP = f"echo '{boot.UP}'"


def run(script: str, *, limit_s: float = 20.0, boot_limit_s: float = 20.0) -> int | None:
    return boot.boot(["/bin/sh", "-c", script], limit_s=limit_s, boot_limit_s=boot_limit_s)


@pytest.mark.parametrize("status", [0, 1, 5])
def test_the_exit_status_is_that_of_the_guests_command(status: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"echo early; {UP}; echo '1 passed'; echo '{boot.EXIT}{status}'; sleep 30") == status
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "1 passed"
    assert "early" not in lines


def test_a_guest_that_takes_too_long_is_ended_by_its_id(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    begun_s = time.monotonic()
    assert run(f"echo $$ > {pid_file}; {UP}; exec sleep 60", limit_s=1.0) == 1
    assert time.monotonic() - begun_s < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize(
    ("packets", "loopback_bytes", "objection"),
    [(512, 0, None), (511, 0, "511 packets"), (512, 2 << 20, "the loopback device carried")],
)
def test_the_witness_objects_to_bytes_that_went_elsewhere(
    packets: int, loopback_bytes: int, objection: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = {"PACKETS": (7, packets), "LOOPBACK": (1000, loopback_bytes)}
    for name, (begin, _) in counters.items():
        (tmp_path / name).write_text(f"{begin}\n")
        monkeypatch.setattr(witness, name, tmp_path / name)
    count = witness.Count()
    for name, (begin, more) in counters.items():
        (tmp_path / name).write_text(f"{begin + more}\n")
    found = count.objection(2 << 20)
    assert found is None if objection is None else found is not None and objection in found
