"""How often a request is tried, and what its client is told when that was not enough."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog

from kvferry.router.api import ApiError, Call
from kvferry.router.metrics import RouterMetrics
from kvferry.router.servers import Server, ServerFailed

log = structlog.get_logger(__name__)

PAUSE_S: Final = 0.05
"""Before the second attempt, which may go to the same server where there is one alone; twice as long before each that follows."""

MAX_PAUSE_S: Final = 1.0


class Attempts:
    """The attempts of one request.

    Args:
        retries: How many may follow the first.
    """

    def __init__(self, retries: int, call: Call[Any], metrics: RouterMetrics) -> None:
        self._left = retries
        self._call = call
        self._metrics = metrics
        self._num_attempts = 1
        self.failed: frozenset[Server] = frozenset()
        self.is_sequential = False

    async def next(self, failure: ServerFailed) -> None:
        """An attempt has failed before the first token, and the next one may begin.

        Raises:
            ApiError: It was the last.
        """
        if failure.kind == "stale":  # nobody's fault as far as one can tell; the sequential flow tells more, and is never stale
            self.is_sequential = True
        elif not self._left:
            log.error("request_failed", request_id=self._call.request_id, tries=self._num_attempts, reason=str(failure))
            raise _last_word(failure, self._num_attempts) from failure
        else:
            self._left -= 1
            self.failed |= {failure.server}
        log.warning("request_retried", request_id=self._call.request_id, reason=str(failure), next_try=self._num_attempts + 1)
        self._metrics.retried()
        if failure.kind != "stale":
            await asyncio.sleep(min(MAX_PAUSE_S, PAUSE_S * 2 ** (self._num_attempts - 1)))
        self._num_attempts += 1


def _last_word(failure: ServerFailed, num_attempts: int) -> ApiError:
    text = str(failure) if num_attempts == 1 else f"{failure} (the last of {num_attempts} tries)"
    if failure.status in (429, 503) or failure.kind in ("unreachable", "lost"):
        return ApiError(failure.status or 503, text, retry_after_s=1)
    return ApiError(502, text)
