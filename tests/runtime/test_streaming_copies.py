"""The environment that tells the C library of rank processes to copy past the cache."""

from __future__ import annotations

import os
import subprocess

import pytest

from node_runtime.streaming_copies import MIN_BYTES, THRESHOLD, TUNABLES, streaming_copies, tunables

OURS = f"{THRESHOLD}={MIN_BYTES:#x}"
OTHER = "glibc.malloc.check=3"


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        (None, OURS),
        ("", OURS),
        (OTHER, f"{OTHER}:{OURS}"),
        (f"{THRESHOLD}=0x100000:{OTHER}", f"{THRESHOLD}=0x100000:{OTHER}"),
    ],
)
def test_values_that_are_set_already_stay(before: str | None, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)
    if before is not None:
        monkeypatch.setenv(TUNABLES, before)
    with streaming_copies():
        assert os.environ[TUNABLES] == inside
    assert os.environ.get(TUNABLES) == before


def test_glibc_accepts_the_value() -> None:
    """The loader itself prints the value that it uses."""
    loader = "/lib64/ld-linux-x86-64.so.2"
    if not os.path.exists(loader):
        pytest.skip("no glibc for x86-64 here")
    environment = {TUNABLES: tunables({})}
    done = subprocess.run([loader, "--list-tunables"], env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("this glibc cannot list its tunables (before 2.33)")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{THRESHOLD}:")]
    assert line.startswith(f"{THRESHOLD}: {MIN_BYTES:#x} ")
