"""Declare every setting once, for a YAML file, the environment and flags.

A setting is named by its path, for example ``pool.page_size``. Its value comes from the first of these sources that has it:

1. flags (``--set pool.page_size=32``, or a named flag of the daemon),
2. the environment (``KVFERRY_POOL__PAGE_SIZE=32``: the path in capitals, ``__`` for each dot),
3. the YAML file,
4. the default.

Every source rejects a name that is no setting. Only the variables that Kubernetes sets for a Service are ignored. All errors are
reported at once, one line each: path, value, source, and the valid values.
``python -m transfer.config`` prints docs/configuration.md.
"""

from transfer.config.memory import (
    CPU_POOL_PAGES,
    ChunkConfig,
    RingConfig,
    StagingConfig,
)
from transfer.config.network import (
    DiscoveryConfig,
    NodeServerConfig,
    ServerConfig,
    TlsConfig,
    TransportConfig,
    UcxConfig,
)
from transfer.config.nodes import (
    ClientConfig,
    ConnectorConfig,
    ConnectorLimitsConfig,
    DecodeNodeConfig,
    NodeConfig,
    PrefillNodeConfig,
    ProcessConfig,
    RootConfig,
    StoreConnectorConfig,
)
from transfer.config.operation import (
    MAX_HEARTBEAT_S,
    MIN_HEARTBEAT_S,
    BreakerConfig,
    DecodeLimitsConfig,
    HeartbeatConfig,
    LogConfig,
    PrefillLimitsConfig,
    RestartConfig,
    SpeculativeConfig,
    TracingConfig,
)
from transfer.config.storage import HostMemoryConfig, StorageConfig
from transfer.config.values import (
    EMBEDDED_ENGINE,
    ENVIRONMENT_PREFIX,
    parse_size,
    settings,
)

__all__ = [
    "CPU_POOL_PAGES",
    "EMBEDDED_ENGINE",
    "ENVIRONMENT_PREFIX",
    "MAX_HEARTBEAT_S",
    "MIN_HEARTBEAT_S",
    "BreakerConfig",
    "ChunkConfig",
    "ClientConfig",
    "ConnectorConfig",
    "ConnectorLimitsConfig",
    "DecodeLimitsConfig",
    "DecodeNodeConfig",
    "DiscoveryConfig",
    "HeartbeatConfig",
    "HostMemoryConfig",
    "LogConfig",
    "NodeConfig",
    "NodeServerConfig",
    "PrefillLimitsConfig",
    "PrefillNodeConfig",
    "ProcessConfig",
    "RestartConfig",
    "RingConfig",
    "RootConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "StagingConfig",
    "StorageConfig",
    "StoreConnectorConfig",
    "TlsConfig",
    "TracingConfig",
    "TransportConfig",
    "UcxConfig",
    "parse_size",
    "settings",
]
