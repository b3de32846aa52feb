"""Log rejected calls and requests at once, and then once a minute."""

from __future__ import annotations

import structlog

from transfer.errors import ConfigError, TransferError
from transfer.log_rate_limiter import LogRateLimiter
from transfer.metrics import abort_reason
from transfer.registry.guard import Refusal

log = structlog.get_logger(__name__)


def log_refusal(refusal: Refusal, said: LogRateLimiter) -> None:
    """Log a rejected call, unless the same one was logged less than a minute ago."""
    if said.is_due((refusal.method, refusal.caller)):
        log.warning("call_refused", method=refusal.method, caller=refusal.caller, reason=refusal.reason)


def say_request_refused(error: TransferError, said: LogRateLimiter) -> None:
    """Log a request that was rejected with `error`, unless one of the same kind was logged less than a minute ago."""
    kind = abort_reason(error)
    if said.is_due(("request", kind)):
        log.warning("request_refused", kind=kind, reason=without_request(error))


def without_request(error: TransferError) -> str:
    """Return why a request was rejected, for logs and traces. Errors of a request quote it, so they are left out."""
    return "the request is wrong; its caller was told what of it" if isinstance(error, ConfigError) else str(error)
