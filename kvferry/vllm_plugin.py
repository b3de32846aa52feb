"""Let vLLM find kvferry's connectors by their names, and give decode sides `FirstTokenScheduler` by default.

vLLM calls `register` by the entry point group ``vllm.general_plugins``, in each of its processes and also without kvferry. So
this module imports little, is outside of `kvferry.engines`, which changes gRPC's log, and logs errors instead of raising them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import structlog

CONNECTOR: Final = "KvferryConnector"
MODULES: Final = {CONNECTOR: "kvferry.engines.vllm_connector", "KvferryStoreConnector": "kvferry.engines.vllm_store_connector"}
"""Modules of the connectors, by name."""

SCHEDULER: Final = "kvferry.engines.vllm_scheduler.FirstTokenScheduler"
_IS_WRAPPED: Final = "_is_completed_by_kvferry"

log = structlog.get_logger(__name__)


def register() -> None:
    """Complete each configuration of vLLM when vLLM has checked it. No-op if this was done."""
    try:
        from vllm.config import KVTransferConfig, VllmConfig

        _complete(KVTransferConfig, _set_module)
        _complete(VllmConfig, _set_scheduler)
    except Exception as error:  # vLLM would end, also an engine without kvferry
        _warn(error)


def _complete(kind: type, complete: Callable[[Any], None]) -> None:
    """Have a class of configurations call `complete` at the end of its ``__post_init__``."""
    post_init: Callable[..., None] = kind.__post_init__  # type: ignore[attr-defined]
    if hasattr(post_init, _IS_WRAPPED):
        return

    @functools.wraps(post_init)
    def completed(self: Any, *args: Any, **kwargs: Any) -> None:
        post_init(self, *args, **kwargs)
        try:
            complete(self)
        except Exception as error:
            _warn(error)

    setattr(completed, _IS_WRAPPED, True)
    kind.__post_init__ = completed  # type: ignore[attr-defined]


def _warn(error: Exception) -> None:
    log.warning("vllm_plugin_failed", error=f"{type(error).__name__}: {error}")


def _set_module(transfer: Any) -> None:
    """Name the module of a connector. Workers get it, too, and so do the connectors in a `MultiConnector`."""
    if transfer.kv_connector in MODULES and transfer.kv_connector_module_path is None:
        transfer.kv_connector_module_path = MODULES[transfer.kv_connector]


def _set_scheduler(config: Any) -> None:
    """Choose the scheduler of a decode side, as vLLM itself does for diffusion models."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR or not transfer.is_kv_consumer:
        return
    if config.scheduler_config.scheduler_cls is None:
        if reason := _why_untested() or why_no_first_tokens(config):
            _say_once(reason)
        else:
            config.scheduler_config.scheduler_cls = SCHEDULER


def why_no_first_tokens(config: Any) -> str:
    """Return why an engine with this `VllmConfig` cannot begin answers with the prefill side's token; empty if it can."""
    if not config.kv_transfer_config.is_kv_consumer:
        return "kv_role is kv_producer, so no KV is received"
    if not config.scheduler_config.async_scheduling:
        return "asynchronous scheduling is off; enable it"
    if not config.use_v2_model_runner:
        return "vLLM uses model runner V1, which does not read tokens after the prompt of a new request"
    if config.num_speculative_tokens:
        return "speculative decoding is on; its first draft needs the step that samples the first token"
    return ""


def _why_untested() -> str:
    import vllm

    from kvferry.engines.vllm_settings import check_version
    from transfer.errors import ConfigError

    try:
        check_version(vllm.__version__, allow_untested=False)
    except ConfigError as error:
        return str(error)
    return ""


@functools.cache
def _say_once(reason: str) -> None:
    log.info("first_tokens_not_used", reason=reason)
