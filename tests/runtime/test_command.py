"""The daemons' command line: which setting each flag is, and what stays as the file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from decode_node.__main__ import app as decode_app
from node_runtime import command, exit_codes
from prefill_node.__main__ import app as prefill_app
from transfer.config import NodeConfig

FLAGS = {
    "model": "elsewhere",
    "parallel.tp_size": 2,
    "pool.page_size": 8,
    "server.host": "127.0.0.2",
    "server.port": 0,
    "server.http_port": 0,
    "transport.name": "inproc",
    "ready_file": "ready.json",
    "log.level": "error",
    "log.format": "json",
}
NAMES = {path: f"--{name.replace('_', '-')}" for name, path in command.SETTING_OF_FLAG.items()}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[NodeConfig]:
    """The settings with which a node would begin."""
    configs: list[NodeConfig] = []
    load_config = command.load_config

    def load(*args: Any, **kwargs: Any) -> Any:
        configs.append(load_config(*args, **kwargs))
        return configs[-1]

    monkeypatch.setattr(command, "load_config", load)
    return configs


def run(app: Typer, *arguments: str) -> None:
    ended = CliRunner().invoke(app, ["serve", *arguments])
    assert ended.exit_code == exit_codes.BAD_CONFIG and "model is " in ended.output, "there is no model, so no node"


def value_of(config: NodeConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("app", [prefill_app, decode_app], ids=["prefill", "decode"])
def test_each_flag_sets_its_setting(app: Typer, loaded: list[NodeConfig]) -> None:
    run(app, *(word for path, value in FLAGS.items() for word in (NAMES[path], str(value))))
    assert {path: str(value_of(loaded[0], path)) for path in FLAGS} == {path: str(value) for path, value in FLAGS.items()}


def test_a_flag_that_is_not_given_leaves_what_the_file_says(loaded: list[NodeConfig], tmp_path: Path) -> None:
    settings = tmp_path / "decode.yaml"
    settings.write_text("model: here\nserver: {port: 7}\npeers: {prefill_nodes: ['a:1']}\n")
    run(decode_app, "--config", str(settings))
    run(decode_app, "--config", str(settings), "--prefill-node", "b:1", "--prefill-node", "c:1", "--set", "server.port=8")
    assert [value_of(config, "peers.prefill_nodes") for config in loaded] == [("a:1",), ("b:1", "c:1")]
    assert [value_of(config, "server.port") for config in loaded] == [7, 8]
