"""Access to UCXX and its workarounds: names, import, transport selection, exceptions."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from transfer.errors import ConfigError, PeerUnreachable, TransportClosed, TransportError, WriteFailed

_ALIASES = {"sm": {"cma", "knem", "xpmem"}, "shm": {"cma", "knem", "xpmem"}, "cuda": {"cuda_ipc"}}  # in UCX_TLS
_CMA_NAMES = {"cma", "sm", "shm"}

_log = logging.getLogger(__name__)


class Ucx:
    """The names of UCXX that the transport uses."""

    def __init__(self, lib: ModuleType) -> None:
        self.Context, self.Worker, self.Address, self.Feature = lib.UCXContext, lib.UCXWorker, lib.UCXAddress, lib.Feature
        self.Tag = lib.UCXXTag
        self.version = ".".join(str(part) for part in lib.get_ucx_version())
        self.Array = importlib.import_module("ucxx._lib.arr").Array
        self.any_tag, self.any_mask = lib.UCXXTag(0), lib.UCXXTagMask(0)
        # ucxx::Endpoint::getCancelingSize
        self._canceling_size = _function(
            "_ZNK4ucxx8Endpoint16getCancelingSizeEv", ctypes.c_size_t, "with writes pending keeps its descriptor"
        )
        self._worker_destroy = _function("ucp_worker_destroy", None, "in the middle of a receive keeps its descriptors")

    def drop_cancelled(self, endpoint: Any) -> None:
        """Make a closed endpoint drop the requests that closing it cancelled.

        UCXX 0.52 keeps them in the endpoint, and they keep the endpoint. So the worker, its descriptor and its memory would never
        be freed. Asking for the number of requests that are being cancelled drops the finished ones. Without a progress thread
        nothing else does. The method is public in C++ and missing in Python.
        """
        if self._canceling_size is not None:
            self._canceling_size(endpoint.ucxx_ptr)

    def destroy(self, worker: Any) -> None:
        """Free UCX's part of a worker that an endless request keeps alive. The worker must not be used any more.

        A peer can fall silent in the middle of a receive, because its host is unreachable or its process is stopped. Then the
        receive cannot be cancelled, and the forced end of the endpoint does not complete it (UCX 1.21 over TCP). UCXX's worker
        and the request keep each other. So descriptors and memory of every such session would stay for the life of the process.
        The two small objects of UCXX do stay, and prevent a second destruction of the worker.
        """
        if self._worker_destroy is not None:
            self._worker_destroy(worker.handle)


def _function(name: str, result: Any, consequence: str) -> Any:
    """Return a function of the loaded libucxx, or of the UCX that it is linked with. None means that it is absent.

    The search begins at the path of libucxx, because another UCX can be in the process.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libucxx.so"):
            function = getattr(ctypes.CDLL("/" + path), name, None)
            if function is not None:
                function.argtypes, function.restype = [ctypes.c_void_p], result
                return function
    _log.warning("libucxx has no function %s: a session closed %s", name, consequence)
    return None


def load_ucxx() -> ModuleType:
    """Import UCXX's bindings, and remove the variables that the import sets in this process's environment.

    Raises:
        ConfigError: ucxx is missing or too old.
    """
    before = set(os.environ)
    try:
        lib = importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise ConfigError(
            f"transport ucx needs ucxx ({error}): pip install 'kvferry[ucx-cu13]' (or kvferry[ucx-cu12] for CUDA 12; "
            "both work without a GPU)"
        ) from error
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]
    if not hasattr(lib.UCXWorker, "tag_recv_with_handle"):
        raise ConfigError("transport ucx needs ucxx 0.52 or newer: pip install -U 'kvferry[ucx-cu13]'")
    return lib


def in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def transport_error(error: Exception, what: str) -> TransportError:
    """Convert an exception of UCXX."""
    kind = type(error).__name__
    if kind in ("UCXUnreachableError", "UCXInvalidAddrError", "UCXNoDeviceError"):
        return PeerUnreachable(f"{what}: {in_words(error)}")
    if kind in ("UCXCanceledError", "UCXCanceled", "UCXCloseError"):
        return TransportClosed(f"{what}: {in_words(error)}")
    return WriteFailed(f"{what}: {in_words(error)}")


def allows_shared_memory(tls: str) -> bool:
    """Return whether a ``UCX_TLS`` allows cross-memory attach."""
    names = set(tls.lstrip("^").split(","))
    return not names & _CMA_NAMES if tls.startswith("^") else bool(names & {"all", *_CMA_NAMES})


def transports_without(tls: str, left_out: tuple[str, ...]) -> str:
    """Return a ``UCX_TLS`` like `tls` that excludes the transports `left_out` and every alias that holds one of them.

    Raises:
        ConfigError: No transport would be left.
    """
    if tls.startswith("^"):
        return ",".join([tls, *left_out])
    names = tls.split(",")
    if "all" in names:
        return "^" + ",".join(left_out)
    aliases = {alias for alias, held in _ALIASES.items() if held & set(left_out)}
    left = [name for name in names if name not in aliases and name not in left_out]
    if not set(left) - {"self"}:
        raise ConfigError(f"UCX_TLS={tls} leaves nothing without {', '.join(left_out)}; add tcp or an RDMA transport")
    return ",".join(left)
