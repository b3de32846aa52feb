"""Ends the processes of a local cluster when the process that started them ends, also by SIGKILL.

It runs as a script and needs only the standard library: ``python -I -S process_guard.py TOKEN FOLDER``. Its standard input is a
pipe whose other end only the starter holds, so end of file means that the starter has ended or has finished with the cluster. The
guard then kills the remaining processes of the cluster and removes its folder.

A process belongs to a cluster if its environment has the cluster's token. Its children inherit it, in any session or group.
Unlike a process id, a token is never reused.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

MARK = "LOCAL_CLUSTER_OF_KVFERRY"  # not KVFERRY_...: the daemons reject unknown names with that prefix
_SWEEP_S = 10.0


def processes_of(token: str) -> dict[int, str]:
    """Return the command lines of the cluster's living processes by process id, without those of other users."""
    wanted = f"{MARK}={token}".encode()
    found: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it has ended, or belongs to another user
        if command:  # a zombie has none
            found[int(name)] = command
    return found


def kill_all(token: str, *, timeout_s: float = _SWEEP_S) -> dict[int, str]:
    """Kill the processes of the cluster until none remains. Return those that still live after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while living := processes_of(token):
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if time.monotonic() > deadline_s:
            return living
        time.sleep(0.02)
    return {}


def _main() -> None:
    token, folder = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the starter, but reach all processes of its terminal
    while os.read(0, 1024):
        continue
    kill_all(token)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
