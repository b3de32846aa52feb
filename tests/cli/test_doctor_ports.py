"""`kvferry doctor --node-config`: the ports of a node's own settings."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.__main__ import app
from kvferry.cli import exit_codes
from kvferry.doctor import command as doctor
from kvferry.doctor.finding import State
from kvferry.doctor.node import check_configured_ports, server_of
from transfer.config import ServerConfig
from transfer.errors import ConfigError


def states(server: ServerConfig) -> dict[str, State]:
    return {one.name: one.state for one in check_configured_ports(server)}


def test_a_port_that_is_taken_is_told_and_one_that_is_free_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        grpc, http = check_configured_ports(ServerConfig(port=port))
        assert (grpc.state, http.state) == (State.WARN, State.OK)
        assert f"127.0.0.1 port {port} (gRPC) is taken" in grpc.text and f"sport = :{port}" in grpc.fix
        assert "a free port" in http.text and "others reach it" in http.text
    assert states(ServerConfig(port=port)) == {"server.port": State.OK, "server.http_port": State.OK}, "it is let go again"


def test_a_configuration_of_either_tier_is_read(tmp_path: Path) -> None:
    for section in ("chunk:\n  chunk_tokens: 64\n", "peers:\n  prefill_nodes: ['h:1']\n"):
        file = tmp_path / "node.yaml"
        file.write_text(f"model: /m\nserver:\n  port: 7100\n{section}")
        assert server_of(file, {}).port == 7100
        assert server_of(file, {"KVFERRY_SERVER__PORT": "7200"}).port == 7200, "as the node reads it"
    file.write_text("model: /m\nserver:\n  prot: 7100\n")
    with pytest.raises(ConfigError, match=r"did you mean server\.port"):
        server_of(file, {})


def test_the_command_looks_at_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter(()))
    file = tmp_path / "node.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file.write_text(f"model: /m\nserver:\n  port: {taken.getsockname()[1]}\n")
        found = CliRunner().invoke(app, ["doctor", "--node-config", str(file)])
    assert found.exit_code == 0 and "warn server.port" in found.output and "ok   server.http_port" in found.output
    missing = CliRunner().invoke(app, ["doctor", "--node-config", str(tmp_path / "none.yaml")])
    assert missing.exit_code == exit_codes.BAD_INPUT and "none.yaml cannot be read" in missing.output
