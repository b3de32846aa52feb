"""Callers that a server with TLS has not let in: said once, and then once a minute."""

from __future__ import annotations

import structlog

from node_runtime.reminders import Reminders
from transfer.registry.guard import Refusal

log = structlog.get_logger(__name__)


def say_refused(refusal: Refusal, said: Reminders) -> None:
    """Log a refused call, unless the same one was logged less than a minute ago."""
    if said.is_due((refusal.method, refusal.caller)):
        log.warning("call_refused", method=refusal.method, caller=refusal.caller, reason=refusal.reason)
