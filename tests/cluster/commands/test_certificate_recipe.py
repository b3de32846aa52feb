"""The recipe for certificates in docs/tls.md, run as an operator runs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from transfer.config import TlsConfig
from transfer.registry.certificates import CertificateFiles


def test_the_recipe_of_the_tls_page_makes_such_files(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "tls.md").read_text(encoding="utf-8")
    recipe = page.split("<!-- recipe for certificates -->\n```bash\n")[1].split("```")[0]
    bash = shutil.which("bash")
    assert bash is not None
    ended = subprocess.run([bash, "-euo", "pipefail", "-c", recipe], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for name in ("prefill", "decode", "client"):
        tls = TlsConfig(cert_file=tmp_path / f"{name}.crt", key_file=tmp_path / f"{name}.key", ca_file=tmp_path / "ca.crt")
        found = CertificateFiles(tls, is_server=name != "client").current()
        assert found.names.dns == (f"{name}.kvferry.example", "localhost")
