"""The daemons' command line: the setting of each flag, precedence, and refused settings."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
import yaml
from typer import Typer
from typer.core import TyperCommand
from typer.testing import CliRunner, Result

from decode_node.command import app as decode_app
from node_runtime import command, daemon, exit_codes
from prefill_node.command import app as prefill_app
from tests.authority import Authority, Files
from transfer import logs
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig
from transfer.plain_text import NODE_WARNING
from transfer.role_settings import load_other_role

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    "model": "elsewhere",
    "parallel.tp_size": 2,
    "device": "cuda",
    "pool.page_size": 8,
    "server.host": "127.0.0.2",
    "server.port": 0,
    "server.http_port": 0,
    "transport.name": "inproc",
    "ready_file": "ready.json",
    "log.level": "error",
    "log.format": "json",
    "tls.cert_file": "tls.crt",
    "tls.key_file": "tls.key",
    "tls.ca_file": "ca.crt",
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


NO_TLS = (
    "TLS is not set up; give tls.cert_file, tls.key_file and tls.ca_file (--tls-cert, --tls-key, --tls-ca), or use plain text on "
    "this machine with --insecure"
)
ANYWHERE = "without TLS it needs --insecure-anywhere (tls.insecure: 2)"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As much of a model directory as the settings are checked against."""
    sizes = {
        "num_attention_heads": 24, "num_key_value_heads": 12, "head_dim": 8, "hidden_size": 192, "intermediate_size": 240,
        "num_hidden_layers": 2, "vocab_size": 4800, "max_position_embeddings": 512, "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    (tmp_path / "tokenizer.json").touch()
    return tmp_path


def check(app: Typer, model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", "--insecure", "--check-config", "--model", str(model), *arguments])


def run(app: Typer, *arguments: str) -> None:
    ended = CliRunner().invoke(app, ["serve", *arguments])
    assert ended.exit_code == exit_codes.BAD_INPUT and "model is " in ended.output, "there is no model, so no node"


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


def test_the_config_file_may_be_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    """In versions of typer before it had its own types, the context has the words of the command line."""
    context = SimpleNamespace(params={"config": "/none.yaml", "set_": (), "check_config": True})
    with pytest.raises(SystemExit) as ended:
        command.run_daemon(cast(Any, context), PrefillNodeConfig)
    assert ended.value.code == exit_codes.BAD_INPUT
    assert "prefill-node: config file /none.yaml cannot be read" in capsys.readouterr().err


APPS = pytest.mark.parametrize("app", [prefill_app, decode_app], ids=["prefill", "decode"])


@APPS
@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (
            ("--tp", "5"),
            "does not divide num_key_value_heads (12) of the model's config.json; it must be one of 1, 2, 3, 4",
        ),
        (("--set", "memory.device_memory=1MiB"), "no page of KV fits: of 1.0 MiB the largest terms are "),
        (("--set", "limits.max_seq_len=513"), "max_seq_len is 513; the model was made for at most 512 tokens"),
        (("--set", "engine=foo:bar"), "engine is foo:bar, which cannot be imported: No module named 'foo'"),
    ],
)
def test_what_no_rank_could_start_with_is_refused(app: Typer, model: Path, arguments: tuple[str, ...], refusal: str) -> None:
    ended = check(app, model, *arguments)
    code = exit_codes.DOES_NOT_FIT if "device_memory" in arguments[-1] else exit_codes.BAD_INPUT
    assert ended.exit_code == code and refusal in ended.output, ended.output
    assert len(ended.output.splitlines()) == 1


@APPS
@pytest.mark.parametrize("arguments", [("--tp", "4"), ("--set", "engine=json:loads")])
def test_check_config_reports_a_valid_configuration(app: Typer, model: Path, arguments: tuple[str, ...]) -> None:
    named = ("--prefill-node", "localhost:1") if app is decode_app else ()
    ended = check(app, model, *arguments, *named)
    assert ended.exit_code == exit_codes.OK
    role = "decode" if app is decode_app else "prefill"
    assert ended.stdout == f"{role}: the configuration is valid\n"
    assert ended.stderr == f"{role}-node: warning: {NODE_WARNING}\n"


@APPS
@pytest.mark.parametrize(
    ("arguments", "refusals"),
    [
        ((), [NO_TLS]),
        (("--insecure", "--host", "10.1.2.3"), ["server.host is 10.1.2.3, which is not a loopback address; " + ANYWHERE]),
        (
            ("--set", "tls.insecure=1", "--host", "::", "--set", "server.advertise_host=node.example"),
            [
                f"server.{it}, which is not a loopback address; " + ANYWHERE
                for it in ("host is ::", "advertise_host is node.example")
            ],
        ),
    ],
)
def test_a_node_does_not_go_without_tls_by_mistake(
    app: Typer, model: Path, arguments: tuple[str, ...], refusals: list[str]
) -> None:
    ended = CliRunner().invoke(app, ["serve", "--model", str(model), *arguments])
    assert ended.exit_code == exit_codes.BAD_INPUT
    assert [line.partition(": ")[2] for line in ended.stderr.splitlines()] == refusals


def test_the_addresses_of_prefill_nodes_are_looked_at_too(model: Path) -> None:
    named = [word for address in ("10.0.0.1:1", "[::1]:1", "pod.example:1") for word in ("--prefill-node", address)]
    ended = check(decode_app, model, *named)
    assert ended.exit_code == exit_codes.BAD_INPUT
    assert [line.split(", which")[0].rsplit(" ", 1)[1] for line in ended.stderr.splitlines()] == ["10.0.0.1:1", "pod.example:1"]


@APPS
def test_insecure_anywhere_allows_every_address(app: Typer, model: Path) -> None:
    far = ("--host", "10.1.2.3", *(("--prefill-node", "pod.example:1") if app is decode_app else ()))
    ended = CliRunner().invoke(app, ["serve", "--check-config", "--model", str(model), "--insecure-anywhere", *far])
    assert ended.exit_code == exit_codes.OK and ended.stderr.count("warning: ") == 1
    twice = check(app, model, "--insecure", *far)  # the form of version 0.1
    assert twice.exit_code == exit_codes.OK and "warning: --insecure twice is deprecated; use --insecure-any" in twice.stderr
    environment = {"KVFERRY_TLS__INSECURE": "2"}
    again = CliRunner().invoke(app, ["serve", "--check-config", "--model", str(model), *far], env=environment)
    assert again.exit_code == exit_codes.OK


@APPS
def test_what_a_start_would_miss_in_the_model_directory_is_refused(app: Typer, model: Path) -> None:
    def assert_refused(text: str) -> None:
        ended = check(app, model)
        assert ended.exit_code == exit_codes.BAD_INPUT and text in ended.output

    tokenizer = model / "tokenizer.json"
    tokenizer.unlink()
    if app is decode_app:
        assert_refused("it has no tokenizer.json")
    else:
        assert check(app, model).exit_code == exit_codes.OK
    tokenizer.touch()
    (model / "model.safetensors").unlink()
    assert_refused("has neither model.safetensors nor")
    named = ("--prefill-node", "localhost:1") if app is decode_app else ()
    assert check(app, model, "--dummy-weights", *named).exit_code == exit_codes.OK


def test_a_decode_node_that_would_never_be_ready_is_refused(model: Path) -> None:
    ended = check(decode_app, model)
    assert ended.exit_code == exit_codes.BAD_INPUT and "would never be ready: give --prefill-node" in ended.stderr


def test_a_ring_below_the_smallest_piece_is_refused(model: Path) -> None:
    ended = check(decode_app, model, "--set", "ring.capacity_bytes=256", "--prefill-node", "localhost:1")
    assert ended.exit_code == exit_codes.BAD_INPUT
    assert "ring.capacity_bytes is 256; one layer of one token of this model has 768 bytes on a rank" in ended.stderr


def test_the_collector_spares_all_that_a_leader_has_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection over torch would stop its loop for a tenth of a second."""
    loaded: list[list[object]] = []
    is_spared: list[bool] = []

    class Daemon:
        def __init__(self, *_: object, other_config: None) -> None:
            loaded.append([])

        async def run(self) -> int:
            is_spared.append(all(one is not loaded[0] for one in gc.get_objects()))
            return exit_codes.OK

    monkeypatch.setattr(daemon, "Daemon", Daemon)
    for module, name in ((command, "prepare_process"), (command, "start_fork_server"), (logs, "configure_logging")):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    context = typer.Context(TyperCommand("serve"))
    context.params = {"model": model, "insecure": 1}
    try:
        with pytest.raises(SystemExit) as ended:
            command.run_daemon(context, PrefillNodeConfig)
        assert ended.value.code == exit_codes.OK and is_spared == [True]
    finally:
        gc.unfreeze()


def test_an_option_of_the_other_daemon_names_that_daemon() -> None:
    ended = CliRunner().invoke(prefill_app, ["serve", "--prefill-node", "a:1"])
    assert ended.exit_code == 2 and "No such option: --prefill-node. It is an option of decode-node." in ended.output


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_is_refused_leaves_no_process(role: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"{role}_node", "serve", "--insecure", "--model", str(tmp_path)]
    refused = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = refused.communicate(timeout=60)  # ends when the last process of the node has closed its standard error
        assert refused.returncode == 2 and "it has no config.json" in errors and len(errors.splitlines()) == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(refused.pid, signal.SIGKILL)


def tls_flags(files: Files) -> tuple[str, ...]:
    return "--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca)


@APPS
def test_certificates_are_looked_at_before_anything_starts(app: Typer, model: Path, tmp_path: Path) -> None:
    """tests/registry/test_certificates.py checks the content of certificates."""
    files = Authority().files(tmp_path / "tls", "node.example")
    serve = ["serve", "--check-config", "--model", str(model), "--host", "10.1.2.3", *tls_flags(files)]
    serve += ["--peer-name", "a.example", "--peer-name", "*.b.example", "--client-name", "spiffe://c.example/ops"]
    serve += ["--prefill-node", "10.1.2.4:7100"] if app is decode_app else []
    ended = CliRunner().invoke(app, serve)
    assert ended.exit_code == exit_codes.OK and "TLS" not in ended.stderr
    files.cert.unlink()
    ended = CliRunner().invoke(app, serve)
    assert ended.exit_code == exit_codes.BAD_INPUT and "cannot be read: No such file or directory" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_node_that_would_let_nobody_in_does_not_start(model: Path, tmp_path: Path) -> None:
    serve = ["serve", "--check-config", "--model", str(model), *tls_flags(Authority().files(tmp_path / "tls", "node.example"))]
    with_peers = [*serve, "--peer-name", "a.example"]
    ended = CliRunner().invoke(prefill_app, serve)
    refusal = "tls.peer_names is empty; it must have the names of the dec"
    assert ended.exit_code == exit_codes.BAD_INPUT and refusal in ended.stderr
    assert CliRunner().invoke(prefill_app, with_peers).exit_code == exit_codes.OK
    ended = CliRunner().invoke(decode_app, with_peers)
    assert ended.exit_code == exit_codes.BAD_INPUT and "tls.client_names is empty; " in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--tls-cert", "c"), "tls.cert_file is c and key_file is missing; TLS needs cert_file, key_file and ca_file"),
        (
            ("--tls-cert", "c", "--tls-key", "k", "--tls-ca", "a", "--insecure"),
            "tls.insecure is 1 and cert_file is c; set one of them",
        ),
        (("--peer-name", "10.0.0.1"), "'10.0.0.1' is not a valid name; it must be a DNS name"),
    ],
)
def test_settings_of_tls_that_make_no_sense(model: Path, arguments: tuple[str, ...], complaint: str) -> None:
    ended = CliRunner().invoke(prefill_app, ["serve", "--check-config", "--model", str(model), *arguments])
    assert ended.exit_code == exit_codes.BAD_INPUT and complaint in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_the_settings_files_of_the_documents_are_accepted(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    upgrades = (ROOT / "docs" / "upgrades.md").read_text(encoding="utf-8")
    prefill, decode, *_ = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    assert PrefillNodeConfig.model_validate(prefill).server.port == 7100
    assert DecodeNodeConfig.model_validate(decode).peers.prefill_nodes
    (own,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "prefill_nodes: [" in block]
    (other,) = re.findall(r"`as-prefill\.yaml`.*?```yaml\n(.*?)```", upgrades, re.DOTALL)
    file = tmp_path / "as-prefill.yaml"
    file.write_text(other)
    assert isinstance(
        load_other_role(DecodeNodeConfig.model_validate(yaml.safe_load(own) | {"other_role": file})), PrefillNodeConfig
    )
