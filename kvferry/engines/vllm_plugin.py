"""Give vLLM kvferry's connectors by their names, and decode sides `FirstTokenScheduler` by default.

vLLM calls `register` by the entry point group ``vllm.general_plugins``, in each of its processes and also without kvferry. So it
imports nothing that vLLM has not loaded, and logs errors instead of raising them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final

import structlog

CONNECTOR: Final = "KvferryConnector"
_MODULES: Final = {CONNECTOR: "kvferry.engines.vllm_connector", "KvferryStoreConnector": "kvferry.engines.vllm_store_connector"}
SCHEDULER: Final = "kvferry.engines.vllm_scheduler.FirstTokenScheduler"
_IS_WRAPPED: Final = "_has_kvferrys_default"

log = structlog.get_logger(__name__)


def register() -> None:
    """Register the connectors, and set the default scheduler of decode sides. No-op if both were done."""
    try:
        _register_connectors()
        _set_default_scheduler()
    except Exception as error:  # vLLM would end, also an engine without kvferry
        log.warning("vllm_plugin_failed", error=f"{type(error).__name__}: {error}")


def _register_connectors() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in _MODULES.items():
        with contextlib.suppress(ValueError):  # it was registered before
            KVConnectorFactory.register_connector(name, module, name)


def _set_default_scheduler() -> None:
    """Choose the scheduler when vLLM's configuration is complete, as vLLM itself does for diffusion models."""
    from vllm.config import VllmConfig

    complete: Callable[..., None] = VllmConfig.__post_init__
    if getattr(complete, _IS_WRAPPED, False):
        return

    @functools.wraps(complete)
    def with_scheduler(self: Any, *args: Any, **kwargs: Any) -> None:
        complete(self, *args, **kwargs)
        if has_first_tokens(self):
            self.scheduler_config.scheduler_cls = SCHEDULER

    setattr(with_scheduler, _IS_WRAPPED, True)
    VllmConfig.__post_init__ = with_scheduler


def has_first_tokens(config: Any) -> bool:
    """Return whether an engine with this `VllmConfig` can begin answers with the prefill side's token, and names no scheduler."""
    transfer, scheduler = config.kv_transfer_config, config.scheduler_config
    return bool(
        transfer is not None
        and transfer.kv_connector == CONNECTOR
        and transfer.is_kv_consumer
        and scheduler.scheduler_cls is None
        and scheduler.async_scheduling
        and not config.num_speculative_tokens
        and config.use_v2_model_runner
        and _is_tested()
    )


def _is_tested() -> bool:
    import vllm

    from kvferry.engines.vllm_settings import check_version
    from transfer.errors import ConfigError

    try:
        check_version(vllm.__version__, allow_untested=False)
    except ConfigError:
        return False
    return True
