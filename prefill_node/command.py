"""The command line of `prefill-node`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import typer

from node_runtime import command
from node_runtime.command_line import HelpfulCommand, Insecure, InsecureAnywhere, example
from transfer.config import PrefillNodeConfig

app = command.daemon_app("Compute prompts, and transfer their KV to decode nodes.")


class PrefillCommand(HelpfulCommand):
    """A command of `prefill-node`."""

    owners: ClassVar[Mapping[str, str]] = {"--prefill-node": "decode-node"}


@app.command(cls=PrefillCommand, epilog=example("prefill-node serve --model MODEL --tp 4 --device cuda --insecure"))
def serve(
    context: typer.Context,
    config: command.ConfigFile = None,
    model: command.Model = None,
    dummy_weights: command.DummyWeights = None,
    tp: command.TensorParallel = None,
    device: command.DeviceName = None,
    page_size: command.PageSize = None,
    host: command.Host = None,
    port: command.Port = None,
    http_port: command.HttpPort = None,
    transport: command.TransportName = None,
    ready_file: command.ReadyFile = None,
    log_level: command.LogLevel = None,
    log_format: command.LogFormat = None,
    tls_cert: command.TlsCert = None,
    tls_key: command.TlsKey = None,
    tls_ca: command.TlsCa = None,
    peer_name: command.PeerName = None,
    client_name: command.ClientName = None,
    insecure: Insecure = 0,
    insecure_anywhere: InsecureAnywhere = False,
    set_: command.Overrides = None,
    check_config: command.CheckConfig = False,
) -> None:
    """Run a prefill node until SIGTERM or SIGINT."""
    command.run_daemon(context, PrefillNodeConfig)
