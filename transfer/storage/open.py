"""Open a store from the settings."""

from __future__ import annotations

import asyncio

from transfer.config import StorageConfig
from transfer.metrics import StoreMetrics
from transfer.storage.base import Store
from transfer.storage.client import StoreClient, StoreClientSettings
from transfer.storage.directory import DirectoryStore, check_directory
from transfer.storage.object_store import ObjectStore


def check_store(config: StorageConfig) -> None:
    """Raise ConfigError if the store cannot be opened. Look at no page."""
    if config.directory is not None:
        check_directory(config.directory)
    elif config.url is not None:
        open_store(config)


def open_store(config: StorageConfig) -> Store | None:
    """Return the configured store, or None. Look at no page.

    Raises:
        ConfigError: It cannot be used. The message names the setting.
    """
    if config.directory is not None:
        return DirectoryStore(config.directory, max_bytes=config.max_bytes)
    if config.url is not None:
        return ObjectStore(config.url, timeout_s=max(config.put_timeout_s, config.get_timeout_s))
    return None


def open_store_client(config: StorageConfig, *, loop: asyncio.AbstractEventLoop, observer: StoreMetrics) -> StoreClient | None:
    """Open the store for a loop. Results and errors as of `open_store`."""
    store = open_store(config)
    if store is None:
        return None
    settings = StoreClientSettings(
        put_timeout_s=config.put_timeout_s,
        get_timeout_s=config.get_timeout_s,
        queue_bytes=config.queue_bytes,
        threads=config.threads,
        breaker=config.breaker.settings(),
    )
    return StoreClient(store, loop=loop, settings=settings, observer=observer)
