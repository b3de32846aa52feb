"""Wait until a node that was just started can serve: ``python -m node_runtime.until_ready READY_FILE PID SECONDS``.

The systemd units use this. The node's `ready_file` has the address of ``/readyz``. The exit code is 0 once the node is ready. It
is 1 if the node has ended or the time is over; the reason is then on stderr. This module imports the standard library only,
because it runs beside each start.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from pathlib import Path
from typing import Final

_PAUSE_S: Final = 0.5
_ASK_S: Final = 3.0


def until_ready(ready_file: Path, pid: int, wait_s: float) -> str:
    """Wait for a node, and return why it is not ready; empty if it is.

    Args:
        ready_file: The node's setting of that name. The file may not exist yet.
        pid: Process of the node's leader. The wait ends with it.
        wait_s: Longest wait.
    """
    ends_s = time.monotonic() + wait_s
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "it has ended"
        reason = _why_not(ready_file)
        if not reason or time.monotonic() >= ends_s:
            return reason
        time.sleep(_PAUSE_S)


def _why_not(ready_file: Path) -> str:
    try:
        host, _, port = str(json.loads(ready_file.read_text(encoding="utf-8"))["http_address"]).rpartition(":")
    except FileNotFoundError:
        return "its ranks are starting"
    # The advertised name, or else the local address: only other machines may be able to resolve the name.
    reason = ""
    for address in (host.strip("[]"), "127.0.0.1"):
        connection = http.client.HTTPConnection(address, int(port), timeout=_ASK_S)
        try:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            said = answer.read().decode(errors="replace").strip()
            return "" if answer.status == http.client.OK else said
        except (OSError, http.client.HTTPException) as error:
            reason = reason or f"{address}:{port} does not answer: {error}"
        finally:
            connection.close()
    return reason


def main(arguments: list[str]) -> int:
    """Run the command that the module's docstring describes. Raise ValueError if the arguments are not three, or not numbers."""
    ready_file, pid, wait_s = arguments
    reason = until_ready(Path(ready_file), int(pid), float(wait_s))
    if reason:
        print(f"the node is not ready: {reason}", file=sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
