"""Ids of transfers. Each attempt of a request gets a new id, so that a late message of one attempt cannot reach another.

A client may reuse its request id as soon as it has the last answer. For the ranks that is too early: `WriterDrained` or a
repeated message may still be under way. So the decode leader gives each attempt an id of its own.
"""

from __future__ import annotations

import secrets

from transfer.errors import ConfigError

MAX_REQUEST_ID_CHARS = 96  # a transfer's id adds 17, and messages carry at most 128
MAX_TRANSFER_ID_BYTES = 4 * MAX_REQUEST_ID_CHARS + 17  # in UTF-8


def check_request_id(request_id: str) -> None:
    """Raise ConfigError if the client's id is too long to name its attempts."""
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise ConfigError(f"request_id has {len(request_id)} characters; it can have at most {MAX_REQUEST_ID_CHARS}")


def new_transfer_id(request_id: str) -> str:
    """Return a new id that begins with the client's, for readers of logs. Raise ConfigError if the client's id is too long."""
    check_request_id(request_id)
    return f"{request_id}.{secrets.token_hex(8)}"


def client_id_of(transfer_id: str) -> str:
    """Return the client's id at the begin of a transfer's id; the whole id if `new_transfer_id` did not create it."""
    return transfer_id.rpartition(".")[0] or transfer_id


def is_attempt_of(transfer_id: str, request_id: str) -> bool:
    """Return whether `request_id` of an operator means this transfer: by its own id, or by the client's."""
    return request_id in (transfer_id, client_id_of(transfer_id))
