"""A node's Status answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from node_runtime.daemon import Daemon
from node_runtime.rank_report import RankReport
from transfer.instance import Instance, Link
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import instance_to_proto, link_to_proto


def node_status(
    daemon: Daemon,
    *,
    role: str,
    instance: Instance | None,
    reports: Mapping[int, RankReport],
    queued: int,
    running: int,
    peers: Iterable[pb.PeerStatus],
    links: Iterable[Link],
) -> pb.NodeStatus:
    """What the node says of itself; what a rank said last, at most `rank_process.REPORT_S` old."""
    return pb.NodeStatus(
        role=role,
        state=str(daemon.state),
        instance=instance_to_proto(instance) if instance is not None else None,
        uptime_s=time.monotonic() - daemon.started_s,
        queued_requests=queued,
        running_requests=running,
        ranks=[pb.RankStatus(**reports[rank].status) for rank in sorted(reports)],
        peers=peers,
        links=[link_to_proto(link) for link in links],
        restarts=daemon.num_restarts,
    )
