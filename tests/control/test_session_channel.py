"""The control channel of sessions: over the Unix socket where that is possible, otherwise over TCP."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.control.zmq_ends import KEYS, SERVER_KEYS, Ears, open_ears
from transfer.control.base import ControlClient, Received
from transfer.control.session_channel import SessionControlServer, open_session_client
from transfer.control.unix_channel import DEAD_AFTER_S, UnixControlClient, private_folder
from transfer.control.zmq_channel import ZmqControlClient
from transfer.errors import PeerUnreachable


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:  # tmp_path can be too long for a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
def ears() -> Iterator[Ears]:
    with open_ears() as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[SessionControlServer]:
    opened = SessionControlServer("tcp://127.0.0.1:0", keys=SERVER_KEYS)
    yield opened
    opened.close()


def connect(address: str, local_address: str, session_id: int = 7) -> ControlClient:
    return open_session_client(address, local_address, session_id=session_id, keys=KEYS, server_key=SERVER_KEYS.public)


def test_sessions_over_tcp_and_over_the_unix_socket_are_served_side_by_side(server: SessionControlServer, ears: Ears) -> None:
    heard = ears.hear(server)
    clients = {7: connect(server.address, server.local_address), 8: connect(server.address, "", 8)}
    assert [type(client) for client in clients.values()] == [UnixControlClient, ZmqControlClient]
    for session, client in clients.items():
        server.allow(session, KEYS.public)
        answers = ears.hear(client)
        assert client.send(b"%d" % session)
        ears.until(lambda: bool(heard), "the payload")
        assert heard == [Received(peer=session, payload=b"%d" % session)]
        heard.clear()
        assert server.send(session, b"answer")
        ears.until(partial(bool, answers), "the answer")
        assert answers == [b"answer"]
    server.forget(7)
    assert not server.send(7, b"late") and server.send(8, b"more")
    assert clients[7].send(b"late")
    ears.until(lambda: server.num_dropped == 1, "one drop")
    for client in clients.values():
        client.close()


def test_a_session_that_is_not_allowed_is_dropped_and_counted(server: SessionControlServer, ears: Ears) -> None:
    server.allow(7, KEYS.public)
    heard = ears.hear(server)
    stranger = connect(server.address, server.local_address, 9)
    assert stranger.send(b"let me in")
    ears.until(lambda: server.num_dropped == 1, "one drop")
    assert not heard and not server.send(9, b"no")
    stranger.close()


@pytest.mark.parametrize("case", ["no socket", "no file", "dead server", "other folder", "address of another host", "name"])
def test_a_client_that_cannot_use_the_socket_uses_tcp(server: SessionControlServer, runtime_dir: Path, case: str) -> None:
    address, local_address = server.address, server.local_address
    if case == "no socket":
        local_address = ""
    elif case == "no file":
        local_address = f"unix://{private_folder() / 'missing'}"
    elif case == "dead server":
        local_address = f"unix://{dead_socket(private_folder() / 'dead')}"
    elif case == "other folder":
        moved = runtime_dir / "moved"
        Path(local_address.removeprefix("unix://")).rename(moved)
        local_address = f"unix://{moved}"
    elif case == "address of another host":
        address = "tcp://192.0.2.1:5000"
    else:
        address = "tcp://decode.example:5000"
    client = connect(address, local_address)
    assert isinstance(client, ZmqControlClient)
    client.close()


def test_a_bad_address_is_unreachable(server: SessionControlServer) -> None:
    with pytest.raises(PeerUnreachable, match="nonsense"):
        connect("nonsense", server.local_address)


def test_without_a_private_folder_the_server_listens_on_tcp_only(runtime_dir: Path, ears: Ears) -> None:
    (runtime_dir / f"kvferry-{os.getuid()}").touch()
    server = SessionControlServer("tcp://127.0.0.1:0", keys=SERVER_KEYS)
    assert not server.local_address
    server.allow(7, KEYS.public)
    heard = ears.hear(server)
    client = connect(server.address, server.local_address)
    client.send(b"hello")
    ears.until(lambda: heard == [Received(peer=7, payload=b"hello")], "the payload")
    client.close()
    server.close()


def test_a_new_server_removes_old_sockets_of_killed_servers_only(server: SessionControlServer) -> None:
    folder = private_folder()
    old, young = dead_socket(folder / "old"), dead_socket(folder / "young")
    live = Path(server.local_address.removeprefix("unix://"))
    file = folder / "file"
    file.touch()
    then_s = time.time() - 2 * DEAD_AFTER_S
    for path in (old, live, file):
        os.utime(path, (then_s, then_s))
    SessionControlServer("tcp://127.0.0.1:0", keys=SERVER_KEYS).close()
    assert sorted(folder.iterdir()) == sorted([live, file, young])
    server.close()
    assert not live.exists()


def dead_socket(path: Path) -> Path:
    """Leave a socket file without a server, as a killed process does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path
