"""What the C library of a rank process is told about large copies."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from node_runtime.streaming_copies import MIN_BYTES, THRESHOLD, TUNABLES, streaming_copies, tunables


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({}, f"{THRESHOLD}={MIN_BYTES:#x}"),
        ({TUNABLES: ""}, f"{THRESHOLD}={MIN_BYTES:#x}"),
        ({TUNABLES: "glibc.malloc.check=3"}, f"glibc.malloc.check=3:{THRESHOLD}={MIN_BYTES:#x}"),
        ({TUNABLES: f"{THRESHOLD}=0x100000:glibc.malloc.check=3"}, f"{THRESHOLD}=0x100000:glibc.malloc.check=3"),
    ],
)
def test_what_is_set_already_stays(old: dict[str, str], expected: str) -> None:
    assert tunables(old) == expected


@pytest.mark.parametrize("before", [None, "glibc.malloc.check=0"])
def test_processes_started_inside_have_it_and_this_one_is_as_before(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv(TUNABLES, raising=False)
    else:
        monkeypatch.setenv(TUNABLES, before)
    with streaming_copies():
        code = f"import os; print(os.environ[{TUNABLES!r}])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == tunables({} if before is None else {TUNABLES: before})
    assert os.environ.get(TUNABLES) == before


def test_glibc_takes_the_value() -> None:
    """Asked of the loader itself, which prints what it made of the tunables."""
    loader = "/lib64/ld-linux-x86-64.so.2"
    if not os.path.exists(loader):
        pytest.skip("no glibc for x86-64 here")
    environment = {TUNABLES: tunables({})}
    done = subprocess.run([loader, "--list-tunables"], env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("this glibc cannot list its tunables (before 2.33)")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{THRESHOLD}:")]
    assert line.startswith(f"{THRESHOLD}: {MIN_BYTES:#x} ")
