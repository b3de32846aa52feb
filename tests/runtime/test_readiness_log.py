"""The log of a node tells when `/readyz` turns to 200, and when it turns back."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from node_runtime.daemon import Daemon, NodeState
from node_runtime.health import Readiness
from tests.runtime import rank_entries
from tests.runtime.daemons import QuietRole
from tests.runtime.instances import decode_config


class WaitingRole(QuietRole):
    """A role whose readiness the test sets."""

    ready = Readiness(is_ready=False, reason="no prefill node is joined")

    def readiness(self) -> Readiness:
        return self.ready


def test_node_ready_is_logged_with_the_readiness_of_the_role_not_with_its_ranks(tmp_path: Path) -> None:
    role = WaitingRole(decode_config(tmp_path), rank_entries.obedient)
    daemon = Daemon(decode_config(tmp_path), lambda *_: role)
    with capture_logs() as logs:
        daemon.readiness_changed()
        daemon.state = NodeState.READY  # all ranks are ready
        daemon.readiness_changed()
        assert not logs, "a decode node without a prefill node is not ready"
        role.ready = Readiness(is_ready=True)
        daemon.readiness_changed()
        daemon.readiness_changed()
        daemon.state = NodeState.DRAINING
        daemon.readiness_changed()
    assert [line["event"] for line in logs] == ["node_ready", "node_not_ready"]
    assert logs[1]["reason"] == "the node is draining"
