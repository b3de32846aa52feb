"""Command line of both daemons: a settings file, the environment, and flags, which have precedence.

This module imports only the modules that the settings need. The fork server imports torch at the same time; see
`node_runtime.fork_server`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import transfer
from node_runtime import exit_codes
from node_runtime.command_line import SECURITY_PANEL, HelpfulTyper, insecure_level
from node_runtime.fork_server import end_fork_server, start_fork_server
from node_runtime.node_role import check_step_fits, make_leader, preloaded_modules
from node_runtime.process_setup import freeze_gc, prepare_process
from transfer.config import DecodeNodeConfig, NodeConfig
from transfer.errors import ConfigError, TransferError
from transfer.load_config import load_config

SETTING_OF_FLAG = {
    "model": "model",
    "dummy_weights": "dummy_weights",
    "tp": "parallel.tp_size",
    "device": "device",
    "page_size": "pool.page_size",
    "host": "server.host",
    "port": "server.port",
    "http_port": "server.http_port",
    "transport": "transport.name",
    "prefill_node": "peers.prefill_nodes",
    "ready_file": "ready_file",
    "log_level": "log.level",
    "log_format": "log.format",
    "tls_cert": "tls.cert_file",
    "tls_key": "tls.key_file",
    "tls_ca": "tls.ca_file",
    "peer_name": "tls.peer_names",
    "client_name": "tls.client_names",
}

FLAG_OF_SETTING = {path: f"--{name.replace('_', '-')}" for name, path in SETTING_OF_FLAG.items()}

ConfigFile = Annotated[Path | None, typer.Option(help="YAML file of settings.")]
Model = Annotated[Path | None, typer.Option(help="Hugging Face model directory (model).")]
DummyWeights = Annotated[
    bool | None, typer.Option("--dummy-weights", help="Random weights, from config.json alone (dummy_weights).")
]
TensorParallel = Annotated[int | None, typer.Option(help="Tensor parallel degree (parallel.tp_size).")]
DeviceName = Annotated[str | None, typer.Option("--device", help="cpu, or cuda: one GPU for each rank (device).")]
PageSize = Annotated[int | None, typer.Option(help="Tokens per page (pool.page_size).")]
Host = Annotated[str | None, typer.Option(help="Address to bind (server.host).")]
Port = Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one (server.port).")]
HttpPort = Annotated[
    int | None, typer.Option(help="Port of metrics, health and status page; 0 takes a free one (server.http_port).")
]
TransportName = Annotated[str | None, typer.Option(help="Data plane: auto, shm, ucx, nixl or cuda_ipc (transport.name).")]
ReadyFile = Annotated[Path | None, typer.Option(help="Write this file when the node is started (ready_file).")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error (log.level).")]
LogFormat = Annotated[str | None, typer.Option(help="text or json (log.format).")]


def _security_option(help: str, **settings: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=SECURITY_PANEL, **settings)


TlsCert = Annotated[Path | None, _security_option("PEM certificate of this node (tls.cert_file).")]
TlsKey = Annotated[Path | None, _security_option("PEM private key of that certificate (tls.key_file).")]
TlsCa = Annotated[Path | None, _security_option("PEM certificates of the authorities of other certificates (tls.ca_file).")]
PeerName = Annotated[
    list[str] | None,
    _security_option("Name of the other tier's certificates; repeatable (tls.peer_names).", metavar="NAME"),
]
ClientName = Annotated[
    list[str] | None, _security_option("Name of clients' certificates; repeatable (tls.client_names).", metavar="NAME")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set any setting by its path; repeatable.")
]
CheckConfig = Annotated[bool, typer.Option("--check-config", help="Check the configuration and exit.")]


def daemon_app(summary: str) -> typer.Typer:
    """Return a daemon's command line without its command."""
    app = HelpfulTyper(help=summary)
    app.callback()(_callback)
    return app


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"kvferry {transfer.__version__}")
        sys.exit(exit_codes.OK)


def _callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Settings by precedence: --set, named flags, KVFERRY_... in the environment, the file; see docs/configuration.md."""


def run_daemon(context: typer.Context, config_type: type[NodeConfig]) -> None:
    """Load the settings and run the node; exit with one of `exit_codes`.

    Args:
        context: Context of the command. Its named flags have precedence over the file and the environment.
        config_type: Class of the role's settings.
    """
    # Without the flag, a repeatable flag is empty, and any other one of `SETTING_OF_FLAG` is None.
    given = {name: value for name, value in context.params.items() if value != ()}
    flags: dict[str, object] = {SETTING_OF_FLAG[name]: value for name, value in given.items() if name in SETTING_OF_FLAG}
    is_anywhere = given.get("insecure_anywhere", False)
    flags["tls.insecure"] = insecure_level(f"{config_type.role}-node", given.get("insecure", 0), is_anywhere)
    file, overrides, is_check_only = given.get("config"), given.get("set_") or [], given.get("check_config", False)
    try:
        config = load_config(
            config_type,
            file=None if file is None else Path(file),  # older versions of typer have a str in the context
            environment=os.environ,
            flags=flags,
            flag_of=FLAG_OF_SETTING,
            overrides=overrides,
        )
        if not is_check_only:
            prepare_process()
            start_fork_server(preloaded_modules(config))
        config, other_config, warning = _checked(config)
        if is_check_only:
            _report_valid(config, warning)
            code = exit_codes.OK
        else:
            code = _serve(config, other_config, warning)
    except TransferError as error:
        for line in str(error).splitlines():
            print(f"{config_type.role}-node: {line}", file=sys.stderr)
        code = exit_codes.exit_code_of(error)
    finally:
        if not is_check_only:
            end_fork_server()
    sys.exit(code)


def _checked(config: NodeConfig) -> tuple[NodeConfig, NodeConfig | None, str | None]:
    """Validate the settings before a rank starts.

    Returns:
        The settings with the defaults of the device; those of the other role likewise, or None; a warning, or None.
    """
    from node_runtime.rank_setup import check_before_start
    from transfer.plain_text import check_plain_text
    from transfer.registry.certificates import certificate_files
    from transfer.role_settings import load_other_role

    other_config = load_other_role(config)  # from the settings as given, without the defaults of this role's device
    config = check_before_start(config)
    check_step_fits(config)
    if other_config is not None:
        other_config = check_before_start(other_config)
        check_step_fits(other_config)
    warning = check_plain_text(config)
    certificate_files(config)
    return config, other_config, warning


def _report_valid(config: NodeConfig, warning: str | None) -> None:
    """Print that the configuration is valid.

    Raises:
        ConfigError: The node could start, but would never be ready.
    """
    if isinstance(config, DecodeNodeConfig) and not (config.peers.prefill_nodes or config.discovery.finds_nodes):
        raise ConfigError(
            "peers.prefill_nodes is empty, and discovery.kind is static without a discovery.file, so the node would never be "
            "ready: give --prefill-node HOST:PORT, or settings of discovery"
        )
    if warning is not None:
        print(f"{config.role}-node: warning: {warning}", file=sys.stderr)
    print(f"{config.role}: the configuration is valid")


def _serve(config: NodeConfig, other_config: NodeConfig | None, warning: str | None) -> int:
    """Run the node until it ends; return its exit code."""
    import structlog

    from node_runtime.daemon import Daemon
    from transfer.logs import configure_logging
    from transfer.loop_turns import run_measured

    configure_logging(config.log, role=config.role)
    if warning is not None:
        structlog.get_logger(__name__).warning("insecure", reason=warning)
    node = Daemon(config, make_leader, other_config=other_config)
    freeze_gc()
    return run_measured(node.run())
