"""The one exception tree of kvferry.

::

    TransferError
    ├ ConfigError (ValueError)        a setting is wrong; the message names it, its value, and valid values
    ├ LayoutError (ValueError)        two sides, or a model and a parallel size, do not fit each other
    ├ ProtocolError
    │ ├ LocalProtocolError            this process broke a rule (a bug here)
    │ └ RemoteProtocolError           the peer broke a rule (a bug or an attack there)
    ├ ResourceExhausted
    │ └ ChunkTooLarge                 a chunk can never fit the ring or a staging slot
    ├ TransportError
    │ ├ PeerUnreachable               no connection could be made
    │ │ └ NodeDraining                the node accepts no new work; use another one, or wait for its restart
    │ ├ WriteFailed                   a write or receive ended in an error
    │ ├ TransportTimeout              a deadline passed
    │ └ TransportClosed               the session was closed while, or before, it was used
    ├ IntegrityError                  bytes arrived that are not the bytes that were sent
    ├ StoreFailed                     the store failed to write or read KV of a request that cannot run without it
    ├ MemoryPlanError                 the requested sizes do not fit the available memory
    ├ EngineError                     the engine could not load the model or run a step
    │ └ OutOfMemory (MemoryPlanError) memory ran out: the plan left too little, or something else took it
    └ TransferAborted                 the transfer was cancelled on purpose

"Not yet" (ring full, watermark behind, write pending) is a value, never one of these.
"""


class TransferError(Exception):
    """Base of every error that kvferry raises on purpose."""


class ConfigError(TransferError, ValueError):
    """A setting is wrong. The message names the setting, its value, and valid values."""


class LayoutError(TransferError, ValueError):
    """A model, its parallel sizes or two sides of a transfer do not fit each other."""


class ProtocolError(TransferError):
    """A rule of docs/protocol.md was broken."""


class LocalProtocolError(ProtocolError):
    """This process broke a rule: a bug on this side."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule; its message is dropped and counted."""


class ResourceExhausted(TransferError):
    """Staging memory (ring or slot) has no room for the request."""


class ChunkTooLarge(ResourceExhausted):
    """A chunk can never fit: the request fails at once, with both sizes named."""


class TransportError(TransferError):
    """The data plane failed."""


class PeerUnreachable(TransportError):
    """No session could be opened with the peer."""


class NodeDraining(PeerUnreachable):
    """The node accepts no new work, because an operator stops or changes it."""


class WriteFailed(TransportError):
    """A write or a receive ended in an error that the transport reported."""


class TransportTimeout(TransportError):
    """A deadline of the data plane passed."""


class TransportClosed(TransportError):
    """The session is closed."""


class IntegrityError(TransferError):
    """Bytes arrived that are not the bytes that were sent."""


class StoreFailed(TransferError):
    """The store failed while it was the only place of some KV of a running request."""


class MemoryPlanError(TransferError):
    """The requested sizes do not fit the available memory."""


class EngineError(TransferError):
    """The engine could not load the model or run a step.

    Attributes:
        is_fatal: The engine will run no further step; its process must be started again.
        spares_kv: The KV of the request that it ended is not suspect: a whole step failed, or there is a bug.
    """

    is_fatal = False

    def __init__(self, *args: object, spares_kv: bool = False) -> None:
        super().__init__(*args)
        self.spares_kv = spares_kv


class OutOfMemory(EngineError, MemoryPlanError):
    """Memory ran out. The message names the work, the requested and free bytes, and the settings to change.

    The KV of the requests that it ended is not damaged.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args, spares_kv=True)


class Preempted(TransferError):
    """The prefill side's engine preempted the prompt, and computes it again later."""


class TransferAborted(TransferError):
    """The transfer was cancelled on purpose (client, deadline, drain).

    Attributes:
        is_by_operator: By an operator's Abort, and not by the client.
    """

    def __init__(self, *args: object, is_by_operator: bool = False) -> None:
        super().__init__(*args)
        self.is_by_operator = is_by_operator
