"""The dashboard of KV offload: where KV lies, what moves between the tiers, and how the store does (docs/offload.md)."""

from __future__ import annotations

from typing import Final

from deploy.monitoring.charts import Chart, Dashboard, Line, Row, Unit
from deploy.monitoring.promql import per_second, quantile, share, summed

_WHERE_KV_IS: Final = Row(
    title="What is where",
    charts=(
        Chart(
            title="Host memory in use",
            description=(
                "Host pages of each group of layers, as a share of the pool. Held pages belong to running requests; cached ones "
                "are kept for later prompts and make room when others need it, so a full pool is the normal state. When held "
                "pages alone come near 100 %, requests wait for host memory: give more (offload.host_ratio, "
                "offload.host_memory), or send fewer long requests."
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
            title="Tokens of prompts found, by tier",
            description=(
                "Tokens that did not have to come from prefill, by where they were. Host hits cost a copy over the host link, "
                "storage hits a read of the store as well. Many from storage and few from the host: what is asked for again has "
                "left host memory by then, and more host memory pays. Nothing at all: prompts do not begin alike, or callers use "
                "salts of their own."
            ),
            unit=Unit.TOKENS_PER_S,
            lines=(Line(expr=per_second("kvferry_offload_hit_tokens_total", "tier"), legend="{{tier}}"),),
            columns=12,
            is_stacked=True,
        ),
        Chart(
            title="Share of prompts found",
            description=(
                "Of the tokens of all prompts, the part that did not have to come from prefill; gaps are times without a prompt. "
                "At a share near zero, host memory and store cost and give nothing. It falls when host memory or the store's "
                "directory (storage.max_bytes) is too small for what comes again and, without a store, at restarts of the node."
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
            title="Tokens of prompts that prefill loaded",
            description=(
                "Tokens that prefill nodes took from the store and did not compute. Zero although decode finds tokens in "
                "storage: prefill nodes have no store, or another one, or another salt (storage.directory, storage.url, "
                "storage.salt). No data: no prefill node has looked into a store yet."
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
                "Save goes to host memory, load comes from it, copy stays on the device. Compare with the host link, which save "
                "and load share with attention to host pages: near its bandwidth, steps of requests that read host memory get "
                "slower. Save without end beside little load: what is kept is not asked for again, and offload only costs."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=per_second("kvferry_offload_copied_bytes_total", "direction"), legend="{{direction}}"),),
        ),
        Chart(
            title="Seconds of a copy",
            description=(
                "Median and 99th percentile over all ranks. They grow with the pages of a copy; if they grow and the bytes do "
                "not, something else uses the link or the host's memory. No data: nothing was copied lately."
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
                "Pages that have come to host memory on every rank, of prompts and of what was generated. They follow the load. "
                "Flat while tokens are generated: host memory has no room (see the chart of pressure), or what is computed is "
                "known already."
            ),
            unit=Unit.PAGES_PER_S,
            lines=(Line(expr=per_second("kvferry_offload_saved_pages_total", "source"), legend="{{source}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Pages that left the device early, and came back",
            description=(
                "Pages that running requests gave up on the device, and that were brought back when there was room. As many back "
                "as left, all the time: pages go back and forth; move offload.low_water away from offload.high_water. None leave "
                "although requests queue: offload.device_window is not set. Moved on to the store: requests that device and host "
                "memory cannot hold; their steps are slow."
            ),
            unit=Unit.PAGES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_offload_released_pages_total"), legend="left early"),
                Line(expr=per_second("kvferry_offload_restored_pages_total"), legend="came back"),
                Line(expr=per_second("kvferry_offload_stored_pages_total"), legend="moved on to the store"),
            ),
            columns=12,
        ),
        Chart(
            title="Pressure: host memory full, steps missed",
            description=(
                "Should be zero nearly always. Full: requests that wait, or whose pages stay on the device alone, because host "
                "memory has no room; give more, or let fewer requests in. Missed steps: a request waited for pages to be saved "
                "that it has to leave behind; the host link is the limit: take load away, or give the device pool more room."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_offload_host_full_total", "instance"), legend="{{instance}}: host memory full"),
                Line(expr=per_second("kvferry_offload_stalls_total", "instance"), legend="{{instance}}: steps missed"),
            ),
            columns=12,
        ),
    ),
)

_STORE: Final = Row(
    title="Store",
    charts=(
        Chart(
            title="Pages that the store was asked about, by outcome",
            description=(
                "Of both tiers. Missing is a page that was never stored, or was evicted. Corrupt pages are removed and computed "
                "again: more than a few mean a broken disk or service. Foreign ones: something else writes there. Failed, "
                "timeout, refused and circuit_open cost no request anything but what the store would have saved; look at the "
                "store's own health."
            ),
            unit=Unit.PAGES_PER_S,
            lines=(Line(expr=per_second("kvferry_store_operations_total", "op", "outcome"), legend="{{op}}: {{outcome}}"),),
        ),
        Chart(
            title="Bytes put and got",
            description=(
                "Payload of pages that went through. Compare with what the disk or the network to the service can do: near that, "
                "reads wait for writes and prompts for reads."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=per_second("kvferry_store_bytes_total", "op", where='op=~"put|get"'), legend="{{op}}"),),
        ),
        Chart(
            title="Seconds until the store answered",
            description=(
                "Median and 99th percentile of calls; a call has many pages. A prompt waits for get and exists, never for put. "
                "Near storage.get_timeout_s loading from the store stops to pay: lower that bound, or get a faster store. No "
                "data: nothing was asked lately."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(expr=quantile(0.5, "kvferry_store_seconds", "op"), legend="{{op}}: p50"),
                Line(expr=quantile(0.99, "kvferry_store_seconds", "op"), legend="{{op}}: p99"),
            ),
        ),
        Chart(
            title="Pages that wait",
            description=(
                "For the store or its answer, on every process of a node, and of decode nodes those that are to be backed up. A "
                "backup queue that only grows means that the store is slower than what is computed: pages are lost for later "
                "prompts when host memory evicts them first."
            ),
            unit=Unit.PAGES,
            lines=(
                Line(expr=summed("kvferry_store_queue_depth", "role", "instance"), legend="{{role}} {{instance}}: at the store"),
                Line(expr=summed("kvferry_offload_backup_queue", "instance"), legend="{{instance}}: to be backed up"),
            ),
        ),
        Chart(
            title="Circuits that are not closed",
            description=(
                "Processes that leave the store alone (open) or try it again (half-open), for reads and for writes. Above zero "
                "for longer than a minute: the store fails or hangs; nothing is restored meanwhile (read) or nothing is kept "
                "(write), and requests go on without. The nodes' logs name the store at store_circuit_opened."
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
                "Pages that every rank of a decode node has put into the store, and those that one at least could not. Failed "
                "for long: see the outcomes of put on the left of this row; the pages are in no store, and a later prompt "
                "computes them."
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
        "Decode nodes that keep KV in host memory, and the store that both tiers share. To be looked at when prompts that were "
        "seen before are not faster, when long requests are slow, or when the store is in doubt."
    ),
    rows=(_WHERE_KV_IS, _COPIES, _STORE),
)
