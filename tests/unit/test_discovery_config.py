"""The section `discovery`: what does not fit together is refused, with what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.instances import decode_config, prefill_config
from transfer.config import DecodeNodeConfig, DiscoveryConfig
from transfer.errors import ConfigError
from transfer.load_config import load_config
from transfer.plain_text import check_plain_text

ETCD = {"kind": "etcd", "etcd_endpoints": ("https://etcd-0:2379",)}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "dns"}, "dns_name is missing; it must be host:port, for example kvferry-prefill:7100"),
        ({"kind": "etcd"}, "etcd_endpoints is empty; it must name members"),
        ({"dns_name": "a:1"}, "dns_name is a:1 and kind is static; set discovery.kind to dns, or leave it out"),
        ({"kind": "dns", "dns_name": "a:1", "file": "f"}, "file is f and kind is dns; set discovery.kind to static"),
        ({"kind": "dns", "dns_name": "no-port"}, "it must be host:port"),
        ({"kind": "etcd", "etcd_endpoints": ["etcd:2379"]}, "it must be https://host:port or http://host:port"),
        ({"kind": "etcd", "etcd_endpoints": ["ftp://etcd:2379"]}, "it must be https://host:port or http://host:port"),
        ({"kind": "etcd", "etcd_endpoints": ["https://a:1", "https://a:1"]}, "names a member more than once"),
        ({**ETCD, "etcd_prefix": ""}, "1 to 200 visible ASCII characters"),
        ({**ETCD, "etcd_prefix": "kv ferry/"}, "1 to 200 visible ASCII characters"),
        ({**ETCD, "etcd_user": "me"}, "etcd_user is me and etcd_password_file is missing; set both or neither"),
        ({**ETCD, "etcd_key_file": "k"}, "etcd_key_file is k and etcd_cert_file is missing; set both or neither"),
        ({**ETCD, "lease_s": 1}, "greater than or equal to 2"),
        ({"kind": "consul"}, "'static', 'dns' or 'etcd'"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=r"[\s\S]*") as refused:
        DiscoveryConfig(**settings)
    assert problem in str(refused.value)


def test_one_list_of_prefill_nodes(tmp_path: Path) -> None:
    for other in ({"file": "nodes.yaml"}, {"kind": "dns", "dns_name": "a:1"}):
        with pytest.raises(ValueError, match=r"peers\.prefill_nodes is 127\.0\.0\.1:1 and discovery\.(file|kind) is .*; set one"):
            decode_config(tmp_path, peers={"prefill_nodes": ["127.0.0.1:1"]}, discovery=other)


def test_members_come_from_the_environment_too(tmp_path: Path) -> None:
    environment = {
        "KVFERRY_MODEL": str(tmp_path),
        "KVFERRY_DISCOVERY__KIND": "etcd",
        "KVFERRY_DISCOVERY__ETCD_ENDPOINTS": "https://a:2379, https://[::1]:2379",
    }
    config = load_config(DecodeNodeConfig, environment=environment)
    assert config.discovery.etcd_endpoints == ("https://a:2379", "https://[::1]:2379") and config.finds_prefill_nodes


def test_etcd_in_plain_text_needs_what_plain_text_needs(tmp_path: Path) -> None:
    for endpoint in ("http://127.0.0.1:2379", "http://localhost:2379", "https://etcd-0:2379"):
        check_plain_text(prefill_config(tmp_path, discovery={**ETCD, "etcd_endpoints": [endpoint]}))
    away = {**ETCD, "etcd_endpoints": ["https://a:1", "http://etcd-0:2379"]}
    with pytest.raises(ConfigError, match=r"etcd_endpoints is http://etcd-0:2379, .* it must be https://etcd-0:2379, or take"):
        check_plain_text(prefill_config(tmp_path, discovery=away))
    check_plain_text(prefill_config(tmp_path, discovery=away, tls={"insecure": 2}))
    files = {name: tmp_path / name for name in ("cert_file", "key_file", "ca_file")}
    with pytest.raises(ConfigError, match="which is no loopback address"):
        check_plain_text(prefill_config(tmp_path, discovery=away, tls=files))


def test_a_prefix_is_worth_a_step_where_there_is_a_store(tmp_path: Path) -> None:
    store = {"storage": {"directory": tmp_path}, "offload": {"host_ratio": 1.0}}
    assert decode_config(tmp_path).prefix_tokens == 0 and decode_config(tmp_path, **store).prefix_tokens == 512
    assert decode_config(tmp_path, **store, placement={"prefix_tokens": 0}).prefix_tokens == 0
    assert decode_config(tmp_path, placement={"prefix_tokens": 4096}).prefix_tokens == 4096
