"""Arguments: what is wrong with them is one line and an exit code, and no command loads more than it needs."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

import transfer
from decode_node.command import app as decode_app
from kvferry.__main__ import app
from kvferry.cli.generate import GenerateOptions, parse_token_ids
from kvferry.cli.json_report import write_report
from kvferry.cli.text_command import TextCommand
from kvferry.demo.options import DemoOptions
from kvferry.demo.prompts import load_prompts
from node_runtime import exit_codes
from prefill_node.command import app as prefill_app
from transfer.errors import ConfigError, TransferError
from transfer.registry.convert import sampling_from_proto


def kvferry(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def dead_address() -> str:
    """Where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{held.getsockname()[1]}"


def test_version() -> None:
    result = kvferry("--version")
    assert (result.exit_code, result.output) == (0, f"kvferry {transfer.__version__}\n")


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command below `command`, with the words that call it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    else:
        for name, one in inner.items():
            yield from leaves(one, (*path, name))


COMMANDS = [
    *leaves(get_command(app), ("kvferry",)),
    *leaves(get_command(prefill_app), ("prefill-node",)),
    *leaves(get_command(decode_app), ("decode-node",)),
]


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_the_help_of_each_command_has_an_example_that_parses(path: tuple[str, ...], command: Any) -> None:
    words = shlex.split(command.epilog.removeprefix("Example: "))
    assert tuple(words[: len(path)]) == path
    command.make_context(" ".join(path), words[len(path) :])


@pytest.mark.parametrize("arguments", [("-h",), ("node", "-h"), ("status", "-h")])
def test_h_is_help(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, arguments, terminal_width=120)
    assert result.exit_code == 0 and "Usage: " in result.output
    assert "bool" not in result.output, "options without a value show no type"


def test_a_value_after_insecure_names_the_other_flag() -> None:
    result = kvferry("status", "--target", "127.0.0.1:1", "--insecure", "2")
    assert result.exit_code == exit_codes.BAD_INPUT
    assert "--insecure takes no value" in result.output and "--insecure-anywhere" in result.output


LONG = "9" * 5000
"""More digits than Python makes a number of."""
NO_TEXT = b"a\xff".decode(errors="surrogateescape")
"""What Python makes of an argument that is not UTF-8."""
CALLED = ("--insecure", "--target", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("demo", "--requests", "0"), "--requests is 0"),
        (("demo", "--prefill-tp", "0"), "--prefill-tp is 0; it must be in [1, "),
        (("demo", "--decode-page-size", "0"), "--decode-page-size is 0; it must be in [1, "),
        (("demo", "--prefill-order", "XYZ"), "--prefill-order is 'XYZ'; it must be one of NHD, HND"),
        (
            ("demo", "--transport", "tcp"),
            "--transport is tcp; it must be one of auto, shm, ucx, nixl, cuda_ipc, which choose RDMA",
        ),
        (("demo", "--json", "/tmp"), "--json is /tmp; it cannot be written: Is a directory"),
        (("generate", "--target", "127.0.0.1:1", "hi", "--token-ids", "1"), "either a prompt or --token-ids"),
        (("generate", "--target", "127.0.0.1:1", "hi", "--top-p", "1.5"), "--top-p is 1.5"),
        (("generate", "--insecure", "--target", "localhost:99999", "hi"), "'localhost:99999'"),
        (("generate", "--token-ids", LONG, *CALLED), f"--token-ids has '{LONG}'"),
        (("generate", "hi", *CALLED, "--timeout", "1e300"), "--timeout is 1e+300; it must be above 0"),
        (("node", "drain", *CALLED, "--timeout", "1e300"), "--timeout is 1e+300; it must be above 0"),
        (("node", "switch-role", "both", *CALLED), "ROLE is 'both'; it must be one of prefill, decode"),
        (("node", "log-level", "verbose", *CALLED), "LEVEL is 'verbose'; it must be one of debug, info, warning, error"),
        (("plan", "--model", "Qwen/Qwen3-0.6B"), "hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B"),
        (("demo-cluster", "--rate", "1000", "--seconds", "1001"), "--rate 1000 for --seconds 1001 is over 1000000 requests"),
        (("model", "make", "x" * 5000), "cannot be written: File name too long"),
    ],
)
def test_wrong_argument_is_one_line_that_names_it(arguments: tuple[str, ...], named: str) -> None:
    result = kvferry(*arguments)
    assert result.exit_code == exit_codes.BAD_INPUT
    lines = [line for line in result.stderr.splitlines() if ": warning: without TLS" not in line]
    assert len(lines) == 1 and named in lines[0]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("generate", "hi"), "--target"),
        (("node", "drain"), "--target"),
        (("doctor",), "--node"),
        (("top", "--once"), "HOST:PORT"),
    ],
)
def test_a_target_that_is_no_host_and_port_is_refused_before_it_is_called(command: tuple[str, ...], option: str) -> None:
    for target in (f"127.0.0.1:{LONG}", "::1:1", "http://a:1"):
        result = kvferry(*command, "--insecure-anywhere", *((option,) if option.startswith("-") else ()), target)
        assert result.exit_code == exit_codes.BAD_INPUT
        (line,) = result.stderr.splitlines()
        says = f"{option} is {target!r}; it must be host:port with a port from 1 to 65535, an IPv6 host in brackets"
        assert line.startswith("kvferry ") and line.endswith(f": {says}")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generate", NO_TEXT, *CALLED), "prompt"),
        (("status", *CALLED, "--tls-cert", NO_TEXT), "--tls-cert"),
        (("top", "--insecure", "127.0.0.1:1", NO_TEXT), "host:port..."),
    ],
)
def test_an_argument_that_is_not_utf8_is_refused_by_its_name(arguments: tuple[str, ...], named: str) -> None:
    result = kvferry(*arguments)
    assert result.exit_code == exit_codes.BAD_INPUT
    assert f"invalid value for '{named}': " in result.stderr.lower() and "a\\udcff" in result.stderr


def test_every_command_refuses_what_is_not_utf8() -> None:
    found: list[Any] = [get_command(app)]
    for command in found:
        inner = list(getattr(command, "commands", {}).values())
        assert inner or isinstance(command, TextCommand), command.name
        found += inner
    assert len(found) > 15


@pytest.mark.parametrize(
    ("arguments", "option", "most"),
    [(("node", "requests", *CALLED), "--limit", 2**32 - 1), (("model", "make", "/nowhere/new"), "--seed", 2**63 - 1)],
)
def test_a_number_that_is_none_or_out_of_range_is_refused_by_its_name(arguments: tuple[str, ...], option: str, most: int) -> None:
    for number in ("-5", str(most + 1), LONG, "x"):
        result = kvferry(*arguments, option, number)
        assert result.exit_code == exit_codes.BAD_INPUT
        assert f"Invalid value for '{option}'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("generate", "hi", "--insecure"), {}),
        (("status", "--insecure-anywhere"), {}),
        (("status",), {"KVFERRY_TLS__INSECURE": "1"}),
        (("status", "--watch", "--json", "--insecure"), {}),  # the tables would wait for the node to come
    ],
)
def test_each_command_reports_an_address_without_a_server(
    arguments: tuple[str, ...], environment: dict[str, str], dead_address: str
) -> None:
    """Called in plain text, with one warning."""
    result = CliRunner().invoke(app, [*arguments, "--target", dead_address], env={"KVFERRY_MODEL": "of a node", **environment})
    assert result.exit_code == exit_codes.UNAVAILABLE
    warning, refusal = result.stderr.splitlines()
    assert warning.startswith(f"kvferry {arguments[0]}: warning: without TLS (--insecure): ") and dead_address in refusal


NO_TLS = (
    "TLS is not set up; give tls.cert_file, tls.key_file and tls.ca_file (--tls-cert, --tls-key, --tls-ca), or use plain text on "
    "this machine with --insecure"
)
FAR = "--target is 10.0.0.1:1, which is not a loopback address; without TLS it needs --insecure-anywhere (tls.insecure: 2)"


@pytest.mark.parametrize("command", [("generate", "hi"), ("status",)])
@pytest.mark.parametrize(
    ("arguments", "environment", "refusal"),
    [
        (("--target", "127.0.0.1:1"), {}, NO_TLS),
        (("--target", "127.0.0.1:1"), {"KVFERRY_TLS__INSECURE": "0"}, NO_TLS),
        (("--target", "10.0.0.1:1", "--insecure"), {}, FAR),
        (("--target", "10.0.0.1:1"), {"KVFERRY_TLS__INSECURE": "1"}, FAR),
        (
            ("--target", "127.0.0.1:1"),
            {"KVFERRY_TLS__INSECURE": "3"},
            "tls.insecure is 3 (from KVFERRY_TLS__INSECURE); it must be",
        ),
    ],
)
def test_a_node_is_not_called_in_plain_text_by_mistake(
    command: tuple[str, ...], arguments: tuple[str, ...], environment: dict[str, str], refusal: str
) -> None:
    result = CliRunner().invoke(app, [*command, *arguments], env={"KVFERRY_MODEL": "of a node", **environment})
    assert result.exit_code == exit_codes.BAD_INPUT
    assert result.stderr.startswith(f"kvferry {command[0]}: {refusal}") and result.stderr.count("\n") == 1


def test_a_report_file_is_neither_made_nor_changed_before_there_is_a_report(tmp_path: Path) -> None:
    fresh, old, link = tmp_path / "fresh.json", tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("an earlier report")
    link.symlink_to(tmp_path / "nothing.json")
    for file in (fresh, old, link):
        assert DemoOptions(json_file=file).json_file == file
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json"]
    assert link.is_symlink() and old.read_text() == "an earlier report"


def test_a_disk_that_is_full_at_the_end_is_one_line() -> None:
    with pytest.raises(TransferError, match="--json is /dev/full; it cannot be written: No space left on device") as failed:
        write_report({}, Path("/dev/full"))
    assert exit_codes.exit_code_of(failed.value) == exit_codes.FAILED


def test_token_ids_with_commas_and_spaces() -> None:
    assert parse_token_ids("1,15, 27 3") == [1, 15, 27, 3]
    for text in ("1,-2", "1;2", "x", "1.5", "²", str(2**32)):
        with pytest.raises(ConfigError, match="--token-ids"):
            parse_token_ids(text)


def test_request_carries_every_option() -> None:
    request = GenerateOptions(
        token_ids="5,6", max_new_tokens=9, temperature=0.5, top_p=0.75, top_k=4, seed=2**63 - 1, ignore_eos=True
    ).request()
    assert request.WhichOneof("input") == "token_ids" and list(request.token_ids.ids) == [5, 6]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.75, 4, 2**63 - 1)
    assert sampling_from_proto(sampling).seed == 2**63 - 1, "the nodes take what the command line takes"
    assert (request.max_new_tokens, request.ignore_eos) == (9, True)


def test_an_empty_prompt_is_sent_and_not_taken_for_none() -> None:
    assert GenerateOptions(prompt="").request().WhichOneof("input") == "prompt"


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\n  second  \n")
    assert load_prompts(file, None) == ["first", "second"]
    assert load_prompts(file, 1) == ["first"]
    assert load_prompts(file, 5) == ["first", "second", "3. first", "4. second", "5. first"]
    file.write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        load_prompts(file, None)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompts(file, None)


def test_model_make_never_overwrites_by_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    for arguments in ((), ("--force",)):
        result = kvferry("model", "make", str(tmp_path), *arguments)
        assert result.exit_code == exit_codes.BAD_INPUT and str(tmp_path) in result.stderr
        assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    result = kvferry("model", "make", str(tmp_path / "mine.txt"))
    assert result.exit_code == exit_codes.BAD_INPUT and result.stderr.count("\n") == 1


def test_model_make_and_force(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    assert kvferry("model", "make", str(directory)).exit_code == 0
    weights = (directory / "model.safetensors").read_bytes()
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert kvferry("model", "make", str(directory), "--seed", "1").exit_code == exit_codes.BAD_INPUT
    assert (directory / "model.safetensors").read_bytes() == weights
    assert kvferry("model", "make", str(directory), "--seed", "1", "--force").exit_code == 0
    assert (directory / "model.safetensors").read_bytes() != weights
