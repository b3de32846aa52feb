"""The fork server that all nodes of a local cluster share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kvferry.local_cluster.spec import ROLES, ClusterSpec, Role
from node_runtime.fork_server import SHARED_AT, can_share
from node_runtime.node_role import preloaded_modules
from node_runtime.process_setup import TUNABLES, tunables
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig
from transfer.errors import ConfigError
from transfer.load_config import load_config

_CONFIG_OF: Final[Mapping[Role, type[NodeConfig]]] = {"prefill": PrefillNodeConfig, "decode": DecodeNodeConfig}
_WITHOUT_ACCELERATE: Final = "embedded_engine.without_accelerate"


def common_modules(modules_of_nodes: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return the modules that a fork server imports for nodes with these modules.

    `_WITHOUT_ACCELERATE` hides a package that the ranks of a tensor-parallel group need, so it is imported only if all nodes have
    it.
    """
    each = [tuple(modules) for modules in modules_of_nodes]
    union = dict.fromkeys(name for modules in each for name in modules)
    return tuple(name for name in union if name != _WITHOUT_ACCELERATE or all(name in modules for modules in each))


def modules_for(spec: ClusterSpec) -> tuple[str, ...] | None:
    """Return the modules that the ranks of a cluster need; None means that settings are invalid, which the nodes report."""
    try:
        return common_modules(preloaded_modules(load_config(_CONFIG_OF[role], overrides=spec.overrides(role))) for role in ROLES)
    except ConfigError:
        return None


class SharedForkServer:
    """A fork server in its own process, for nodes that other processes start. See docs/adr/0064.

    Args:
        folder: Folder of its socket and its log.
        environment: Its environment. The ranks inherit it, so it is the environment of the nodes.
        modules: Modules that it imports, in order.

    Raises:
        ConfigError: The path of the folder is too long for a socket.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], modules: Iterable[str]) -> None:
        address = folder / "fork-server"
        self.variables = {SHARED_AT: str(address)}
        """Environment variables of the nodes that use it."""
        with socket.socket(socket.AF_UNIX) as listener, open(folder / "fork-server.log", "ab") as log:
            try:
                listener.bind(str(address))
            except OSError as error:
                raise ConfigError(f"the fork server cannot listen in {folder}: {error}; set TMPDIR to a shorter path") from error
            address.chmod(0o600)
            listener.listen()
            alive_r, self._alive_w = os.pipe()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "node_runtime.shared_fork_server", str(listener.fileno()), str(alive_r), *modules],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(environment) | {TUNABLES: tunables(environment)},
                    pass_fds=(listener.fileno(), alive_r),
                    start_new_session=True,
                )
            except BaseException:
                os.close(self._alive_w)
                raise
            finally:
                os.close(alive_r)

    @classmethod
    def for_cluster(cls, spec: ClusterSpec, folder: Path, environment: Mapping[str, str]) -> SharedForkServer | None:
        """Start a fork server. None means that each node starts its own: Python cannot share one, or settings are invalid."""
        modules = modules_for(spec) if can_share() else None
        return None if modules is None else cls(folder, environment, modules)

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """Kill it and wait for its end. Its ranks then appear to have died, so stop the nodes first."""
        self._process.kill()  # it has no data to write, and a normal exit takes a second, because it unloads torch
        self._process.wait()
        os.close(self._alive_w)
