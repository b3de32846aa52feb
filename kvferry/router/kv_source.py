"""The source of the KV of a vLLM prefill server, learnt from its answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from kvferry.router.openai_body import KV_FIELD

log = structlog.get_logger(__name__)

MOST_DOUBT: Final = 3.0
"""Each wrong address adds 1, and each right one subtracts `_TRUST`. From this sum on, the server counts as several engines behind
one URL (data parallel): only its answer names the engine that has a prompt."""

_TRUST: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """Where a decode server finds the KV of a prefill server's prompts.

    Args:
        address: host:port (remote_address).
        engine_id: Names one life of the engine (remote_engine_id).
    """

    address: str
    engine_id: str

    def params(self, transfer_id: str) -> dict[str, Any]:
        """Return the `kv_transfer_params` for the decode server: those of a prefill answer, and `use_first_token`."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_address": self.address,
            "remote_engine_id": self.engine_id,
            "use_first_token": True,  # safe: `VllmBody.prefill` sends the client's sampling parameters
        }


def source_of(params: Mapping[str, Any] | None) -> KVSource | None:
    """Return the source that `kv_transfer_params` name; None if they name none, as with other connectors."""
    if params is None:
        return None
    address, engine_id = params.get("remote_address"), params.get("remote_engine_id")
    if not (isinstance(address, str) and address and isinstance(engine_id, str) and engine_id):
        return None
    return KVSource(address=address, engine_id=engine_id)


class LearntSource:
    """The source of the next prompt of one prefill server, learnt from its earlier answers."""

    def __init__(self, url: str) -> None:
        self.source: KVSource | None = None
        self._url = url
        self._doubt = 0.0
        self._is_without_kv = False

    @property
    def guess(self) -> KVSource | None:
        """The expected source; None if only the server's answer can name it."""
        return self.source if self._doubt < MOST_DOUBT else None

    def learn(self, params: Mapping[str, Any] | None) -> None:
        """Expect the source in an answer of the server."""
        if params is None and not self._is_without_kv:
            log.warning(
                "prefill_without_kv",
                url=self._url,
                reason=f"its answer has no {KV_FIELD}: it has no KV connector, and decode servers compute its prompts again "
                "(vLLM's --kv-transfer-config)",
            )
        self._is_without_kv = params is None
        source = source_of(params)
        if source != self.source:
            self.source = source
            if source is not None:
                log.info("prefill_address_learnt", url=self._url, address=source.address, engine_id=source.engine_id)

    def failed(self, *, is_stale: bool = False) -> None:
        """Forget the source, because the server failed and can come back as another engine.

        Args:
            is_stale: Decode got the source, which seems to be wrong. If that happens repeatedly, no source is expected any more.
        """
        self.source = None
        self._doubt = self._doubt + 1 if is_stale else 0.0
        if self._doubt - 1 < MOST_DOUBT <= self._doubt:
            reason = "its address differs from answer to answer, as of several engines behind one URL: sequential from now on"
            log.warning("prefill_address_unsteady", url=self._url, reason=reason)

    def was_right(self) -> None:
        """Trust the source more, because decode received the KV from it."""
        if self._doubt < MOST_DOUBT:
            self._doubt = max(0.0, self._doubt - _TRUST)
