"""What is used of UCXX: its names, its import, its transport selection, its exceptions; every dealing with its habits is here."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from transfer.errors import ConfigError, PeerUnreachable, TransportClosed, TransportError, WriteFailed

_CMA_NAMES = {"cma", "sm", "shm"}  # in UCX_TLS; the last two are aliases that hold cma

_log = logging.getLogger(__name__)


class Ucx:
    """The few names of UCXX that are used here."""

    def __init__(self, lib: ModuleType) -> None:
        self.Context, self.Worker, self.Address, self.Feature = lib.UCXContext, lib.UCXWorker, lib.UCXAddress, lib.Feature
        self.Tag = lib.UCXXTag
        self.version = ".".join(str(part) for part in lib.get_ucx_version())
        self.Array = importlib.import_module("ucxx._lib.arr").Array
        self.any_tag, self.any_mask = lib.UCXXTag(0), lib.UCXXTagMask(0)
        self._canceling_size = _find_canceling_size()
        self._worker_destroy = _find_worker_destroy()

    def drop_cancelled(self, endpoint: Any) -> None:
        """Make a closed endpoint let go of the requests that its closing cancelled.

        UCXX 0.52 keeps them in the endpoint, they keep the endpoint, and so the worker with its descriptor and memory is never
        freed, unless a progress thread runs or somebody asks for the number of requests that are being cancelled: that drops
        the finished ones. The method is public in C++ and missing in Python.
        """
        if self._canceling_size is not None:
            self._canceling_size(endpoint.ucxx_ptr)

    def destroy(self, worker: Any) -> None:
        """Free what UCX has of a worker that a request keeps alive which never ends; nobody may use the worker any more.

        A receive of which some fragments have come when the peer falls silent (its host is cut off, its process is stopped)
        cannot be cancelled, nor does the forced end of the endpoint complete it (UCX 1.21 over TCP). UCXX's worker keeps it, and
        it keeps the worker: descriptors and memory of every such session would stay for the life of the process. The two small
        objects of UCXX do stay, and keep the worker from being destroyed a second time.
        """
        if self._worker_destroy is not None:
            self._worker_destroy(worker.handle)


def _find_worker_destroy() -> Any:
    """``ucp_worker_destroy`` of the UCX that the loaded libucxx is linked with, or None; another UCX may be in the process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if path[2].rpartition("/")[2].startswith("libucxx.so"):
            function = getattr(ctypes.CDLL("/" + path[2]), "ucp_worker_destroy", None)
            if function is not None:
                function.argtypes, function.restype = [ctypes.c_void_p], None
                return function
    _log.warning("no ucp_worker_destroy is found: a session closed in the middle of a receive keeps its descriptors")
    return None


def _find_canceling_size() -> Any:
    """``ucxx::Endpoint::getCancelingSize`` of the library that is loaded, or None."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if path[2].rpartition("/")[2].startswith("libucxx.so"):
            function = getattr(ctypes.CDLL("/" + path[2]), "_ZNK4ucxx8Endpoint16getCancelingSizeEv", None)
            if function is not None:
                function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_size_t
                return function
    _log.warning("this libucxx has no Endpoint::getCancelingSize: a session closed with writes pending keeps its descriptor")
    return None


def load_ucxx() -> ModuleType:
    """Import UCXX's bindings and undo what their import writes into this process's environment.

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
    """The one place where UCXX's exceptions become ours."""
    kind = type(error).__name__
    if kind in ("UCXUnreachableError", "UCXInvalidAddrError", "UCXNoDeviceError"):
        return PeerUnreachable(f"{what}: {in_words(error)}")
    if kind in ("UCXCanceledError", "UCXCanceled", "UCXCloseError"):
        return TransportClosed(f"{what}: {in_words(error)}")
    return WriteFailed(f"{what}: {in_words(error)}")


def allows_shared_memory(tls: str) -> bool:
    """Whether UCX's transport selection (``UCX_TLS``) leaves cross-memory attach in."""
    names = set(tls.lstrip("^").split(","))
    return not names & _CMA_NAMES if tls.startswith("^") else bool(names & {"all", *_CMA_NAMES})


def without_shared_memory(tls: str) -> str:
    """The same selection without cross-memory attach.

    Raises:
        ConfigError: Nothing would be left.
    """
    if tls.startswith("^"):
        return f"{tls},cma"
    names = tls.split(",")
    if "all" in names:
        return "^cma"
    left = [name for name in names if name not in _CMA_NAMES]
    if not set(left) - {"self"}:
        raise ConfigError(f"UCX_TLS={tls} leaves nothing for lane net of transport ucx; add tcp or an RDMA transport")
    return ",".join(left)
