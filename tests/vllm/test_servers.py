"""How these tests' servers start and end, with small ones in vLLM's place; needs no vLLM, and runs with all other tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.vllm.servers import Servers

# Healthy once its second process runs, which is deaf to SIGTERM where `stubborn` is given.
SMALL = """
    import http.server, signal, subprocess, sys
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if "stubborn" in sys.argv else "import time; "
    script += "print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    child.stdout.readline()
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    def end(*_):
        child.terminate()
        raise SystemExit(0)
    signal.signal(signal.SIGTERM, end)
    server.serve_forever()
"""


def small(*args: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(SMALL), *args]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(tmp_path / "logs")
    yield found
    found.close()


def test_servers_start_side_by_side_on_ports_of_their_own_and_end_with_their_children(servers: Servers) -> None:
    one, other = (servers.start("small", small(), {}) for _ in range(2))
    assert one.wait_ready().url != other.wait_ready().url
    assert len(one.processes()) == len(other.processes()) == 2 and one.pss_bytes() > 0
    assert one.log != other.log
    assert one.stop() == {} and one.exit_code == 0 and one.processes() == {}
    assert len(other.processes()) == 2, "it is another's"
    other.kill()
    assert other.processes() == {} and other.exit_code == -signal.SIGKILL


def test_what_is_left_of_a_server_that_ended_is_named_and_killed(servers: Servers) -> None:
    one = servers.start("small", small("stubborn"), {}).wait_ready()
    one._process.terminate()  # `stop()` gives all of it one time, which a busy machine needs for the first process alone
    deadline_s = time.monotonic() + 60
    while one.exit_code is None:
        assert time.monotonic() < deadline_s, "the first process ends when it is told to"
        time.sleep(0.05)
    left = one.stop(timeout_s=1.0)
    assert len(left) == 1 and one.exit_code == 0
    assert one.processes() == {}


def test_a_server_that_does_not_come_up_shows_its_log(servers: Servers) -> None:
    script = "print('no such model'); raise SystemExit(3)"
    with pytest.raises(RuntimeError, match=r"bad has ended with 3\n(.|\n)*no such model"):
        servers.start("bad", [sys.executable, "-c", script], {}).wait_ready()
    with pytest.raises(RuntimeError, match=r"mute is not ready after 0\.5 s"):
        servers.start("mute", [sys.executable, "-c", "import time; time.sleep(60)"], {}).wait_ready(timeout_s=0.5)


def test_servers_end_with_who_started_them_however_that_went(tmp_path: Path) -> None:
    script = f"""
        import sys, time
        from pathlib import Path
        from tests.vllm.servers import Servers
        servers = Servers(Path({str(tmp_path / "logs")!r}))
        print(*servers.start("small", {small()!r}, {{}}).wait_ready().processes(), flush=True)
        time.sleep(60)
    """
    starter = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pids = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(pids) == 2
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline_s = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline_s, "the guard ends them"
        time.sleep(0.05)
