"""Wait until a node that was just started can serve: ``python -m node_runtime.until_ready READY_FILE PID SECONDS``.

For whoever starts nodes and goes on once one is ready, as the systemd units do. Its `ready_file` says where the node is asked for
``/readyz``. Standard library only, for it is run beside each start. The exit code is 0 once the node is ready, and 1 when it has
ended or the time is over; what it was waiting for is then on stderr.
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
    """Why the node is not ready; empty once it is.

    Args:
        ready_file: The node's setting of that name; it may not be there yet.
        pid: Of the node's leader: without it, nobody waits on.
        wait_s: Seconds to wait at most.
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
    # As the others call it, or else from here: a name may be known to the others only.
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
    """As the module says. Raises ValueError for arguments that are not three, or no numbers."""
    ready_file, pid, wait_s = arguments
    reason = until_ready(Path(ready_file), int(pid), float(wait_s))
    if reason:
        print(f"the node is not ready: {reason}", file=sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
