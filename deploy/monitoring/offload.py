"""The dashboard of KV offload: where KV lies, what moves between the tiers, and how the store does (docs/offload.md)."""

from __future__ import annotations

from typing import Final

from deploy.monitoring.charts import Chart, Dashboard, Line, Row, Unit
from deploy.monitoring.promql import per_second, quantile, share, summed

_WHERE_KV_IS: Final = Row(
    title="Location of KV",
    charts=(
        Chart(
            title="Host memory in use",
            description=(
                "Host pages of each group of layers, as a share of the pool. held: of running requests; cached: kept for "
                "later prompts, so a full pool is normal. Held pages near 100 %: requests wait. Raise offload.host_ratio or "
                "offload.host_memory, or send fewer long requests."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=share(
                        summed("kvferry_host_pages", "group", "state", where='state!="free"'),
                        "state",
                        summed("kvferry_host_pages", "group"),
                    ),
                    legend="{{group}}: {{state}}",
                ),
            ),
            columns=12,
            most=1.0,
        ),
        Chart(
            title="Prompt tokens found, by tier",
            description=(
                "Tokens that prefill did not compute. Host hits cost a copy over the host link, storage hits also a read of "
                "the store. Many from storage and few from the host: more host memory pays. None: prompts share no "
                "beginnings, or callers use different salts."
            ),
            unit=Unit.TOKENS_PER_S,
            lines=(Line(expr=per_second("kvferry_offload_hit_tokens_total", "tier"), legend="{{tier}}"),),
            columns=12,
            is_stacked=True,
        ),
        Chart(
            title="Hit rate",
            description=(
                "Share of prompt tokens that prefill did not compute. Gaps: no prompts. Near zero: host memory and store "
                "bring nothing. It falls if host memory or storage.max_bytes is too small, and without a store at restarts."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=share(
                        per_second("kvferry_offload_hit_tokens_total", "tier"),
                        "tier",
                        per_second("kvferry_offload_prompt_tokens_total"),
                    ),
                    legend="{{tier}}",
                ),
            ),
            columns=12,
            is_stacked=True,
            most=1.0,
        ),
        Chart(
            title="Prompt tokens loaded by prefill",
            description=(
                "Tokens that prefill nodes loaded from the store. Zero although decode finds tokens in storage: prefill nodes "
                "have no store, or another store or salt (storage.directory, storage.url, storage.salt)."
            ),
            unit=Unit.TOKENS_PER_S,
            lines=(Line(expr=per_second("kvferry_loaded_prompt_tokens_total", "instance"), legend="{{instance}}"),),
            columns=12,
            is_stacked=True,
        ),
    ),
)

_COPIES: Final = Row(
    title="Copies between device and host, and pressure",
    charts=(
        Chart(
            title="Bytes copied, by direction",
            description=(
                "save: to host memory; load: from it; copy: on the device. Near the bandwidth of the host link, steps that "
                "read host memory become slower. Much save and little load: kept KV is not requested again."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=per_second("kvferry_offload_copied_bytes_total", "direction"), legend="{{direction}}"),),
        ),
        Chart(
            title="Copy duration",
            description=(
                "Median and 99th percentile of all ranks. It grows with the pages of a copy. Growing without more bytes: "
                "other users of the link or of host memory."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(expr=quantile(0.5, "kvferry_offload_copy_seconds", "direction"), legend="{{direction}}: p50"),
                Line(expr=quantile(0.99, "kvferry_offload_copy_seconds", "direction"), legend="{{direction}}: p99"),
            ),
        ),
        Chart(
            title="Pages saved, by source",
            description=(
                "Pages saved to host memory on every rank. They follow the load. Flat while tokens are generated: host memory "
                "is full, or the KV is already there."
            ),
            unit=Unit.PAGES_PER_S,
            lines=(Line(expr=per_second("kvferry_offload_saved_pages_total", "source"), legend="{{source}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Pages released early and restored",
            description=(
                "Pages of running requests that left the device, and pages that were loaded back. Equal rates all the time: "
                "move offload.low_water away from offload.high_water. None while requests queue: offload.device_window is not "
                "set. Moved to the store: steps of these requests are slow."
            ),
            unit=Unit.PAGES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_offload_released_pages_total"), legend="released early"),
                Line(expr=per_second("kvferry_offload_restored_pages_total"), legend="restored"),
                Line(expr=per_second("kvferry_offload_stored_pages_total"), legend="moved to the store"),
            ),
            columns=12,
        ),
        Chart(
            title="Host memory full, steps stalled",
            description=(
                "Should be near zero. Full: requests wait, or their pages stay on the device only. Stalled: a step waited for "
                "pages to be saved, because the host link is the limit. Add memory, or reduce the load."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_offload_host_full_total", "instance"), legend="{{instance}}: host memory full"),
                Line(expr=per_second("kvferry_offload_stalls_total", "instance"), legend="{{instance}}: steps stalled"),
            ),
            columns=12,
        ),
    ),
)

_STORE: Final = Row(
    title="Store",
    charts=(
        Chart(
            title="Store pages, by outcome",
            description=(
                "missing: never stored, or evicted. corrupt: removed and computed again; more than a few mean a broken disk "
                "or service. foreign: another program writes there. failed, timeout, refused, circuit_open: check the store; "
                "requests only lose the benefit."
            ),
            unit=Unit.PAGES_PER_S,
            lines=(Line(expr=per_second("kvferry_store_operations_total", "op", "outcome"), legend="{{op}}: {{outcome}}"),),
        ),
        Chart(
            title="Store bytes",
            description=(
                "Payload of pages. Near the limit of the disk or network, reads wait for writes, and prompts for reads."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=per_second("kvferry_store_bytes_total", "op", where='op=~"put|get"'), legend="{{op}}"),),
        ),
        Chart(
            title="Store latency",
            description=(
                "Median and 99th percentile of calls with many pages. A prompt waits for get and exists, never for put. Near "
                "storage.get_timeout_s, loading does not pay: lower it, or use a faster store."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(expr=quantile(0.5, "kvferry_store_seconds", "op"), legend="{{op}}: p50"),
                Line(expr=quantile(0.99, "kvferry_store_seconds", "op"), legend="{{op}}: p99"),
            ),
        ),
        Chart(
            title="Pages waiting",
            description=(
                "Pages that wait for the store, and pages of decode nodes that wait for backup. Continuous growth: the store "
                "is slower than generation, and pages are lost when host memory evicts them."
            ),
            unit=Unit.PAGES,
            lines=(
                Line(expr=summed("kvferry_store_queue_depth", "role", "instance"), legend="{{role}} {{instance}}: at the store"),
                Line(expr=summed("kvferry_offload_backup_queue", "instance"), legend="{{instance}}: to be backed up"),
            ),
        ),
        Chart(
            title="Open store circuits",
            description=(
                "Processes that do not use the store (open) or test it (half-open). Above zero for a minute: the store fails "
                "or hangs. Requests continue without it. The log names it (store_circuit_opened)."
            ),
            unit=Unit.CIRCUITS,
            lines=(
                Line(
                    expr=summed("kvferry_store_circuit", "direction", "state", where='state!="closed"'),
                    legend="{{direction}}: {{state}}",
                ),
            ),
        ),
        Chart(
            title="Pages backed up, by outcome",
            description=(
                "Pages that all ranks of a decode node wrote to the store, and pages that at least one rank could not write. "
                "Failed for long: see the outcomes of put. Later prompts compute these pages."
            ),
            unit=Unit.PAGES_PER_S,
            lines=(Line(expr=per_second("kvferry_offload_backups_total", "outcome"), legend="{{outcome}}"),),
            is_stacked=True,
        ),
    ),
)

OFFLOAD: Final = Dashboard(
    name="offload",
    title="kvferry: KV offload",
    description=(
        "KV in host memory and in the store. Use it when repeated prompts are not faster, when long requests are slow, or "
        "when the store has problems."
    ),
    rows=(_WHERE_KV_IS, _COPIES, _STORE),
)
