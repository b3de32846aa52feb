"""The command line of `prefill-node`."""

from __future__ import annotations

import typer

from node_runtime import command
from transfer.config import PrefillNodeConfig

app = command.daemon_app("Computes prompts and moves their KV to decode nodes.")


@app.command()
def serve(
    context: typer.Context,
    config: command.ConfigFile = None,
    model: command.Model = None,
    dummy_weights: command.DummyWeights = None,
    tp: command.TensorParallel = None,
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
    insecure: command.Insecure = 0,
    set_: command.Overrides = None,
    check_config: command.CheckConfig = False,
) -> None:
    """Run a prefill node until SIGTERM or SIGINT."""
    command.run_daemon(context, PrefillNodeConfig)
