"""The command line of `decode-node`."""

from __future__ import annotations

from typing import Annotated

import typer

from node_runtime import command
from node_runtime.command_line import Insecure, InsecureAnywhere, example
from transfer.config import DecodeNodeConfig

app = command.daemon_app("Receive the KV of prompts, and generate tokens.")


@app.command(epilog=example("decode-node serve --model MODEL --device cuda --prefill-node 10.0.0.5:7100 --config decode.yaml"))
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
    prefill_node: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="gRPC address of a prefill node; repeatable (peers.prefill_nodes)."),
    ] = None,
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
    """Run a decode node until SIGTERM or SIGINT."""
    command.run_daemon(context, DecodeNodeConfig)
