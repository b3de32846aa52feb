"""Report the links and lost sessions of a decode rank to its leader, and forget prefill instances that are gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfer.config import ServerConfig
from transfer.connector.messages import ForgetPrefill, LinkProbed, PrefillRankLost
from transfer.instance import Link
from transfer.rank_context import RankContext
from transfer.receive.attach import PrefillSessions, Receiving


class IncomingSessions(PrefillSessions):
    """Keep `PrefillSessions`, and report them to the leader.

    Args:
        context: The rank.
        receiving: Takes the sessions over; closed by the owner, after these.
        server: Listen address and advertised name of the rank.
        heartbeat_s: Seconds between heartbeats, in both directions.
        send: Called with each message to the leader.
    """

    def __init__(
        self,
        *,
        context: RankContext,
        receiving: Receiving,
        server: ServerConfig,
        heartbeat_s: float,
        send: Callable[[object], None],
    ) -> None:
        super().__init__(
            context=context,
            receiving=receiving,
            server=server,
            heartbeat_s=heartbeat_s,
            on_writer_lost=self._say_lost,
            on_link_probed=self._say_probed,
        )
        self._send = send

    def on_message(self, message: Any) -> bool:
        """Handle a message of the leader. Return False if it is not about sessions."""
        if not isinstance(message, ForgetPrefill):
            return False
        self.forget_prefill(message.incarnation, message.reason)
        return True

    def _say_lost(self, incarnation: int, rank: int, reason: str) -> None:
        self._send(PrefillRankLost(incarnation=incarnation, prefill_rank=rank, reason=reason))

    def _say_probed(self, link: Link) -> None:
        self._send(LinkProbed(link=link))
