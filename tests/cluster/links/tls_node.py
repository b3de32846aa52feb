"""`python -m tests.cluster.links.tls_node CERT KEY CA`: serve with TLS in this process until its standard input ends."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from transfer.config import TlsConfig
from transfer.registry.certificates import CertificateFiles
from transfer.registry.security import MutualTls
from transfer.registry.server import serve


async def main() -> None:
    """Print the address, and serve nothing but health."""
    cert, key, ca = map(Path, sys.argv[1:])
    files = CertificateFiles(TlsConfig(cert_file=cert, key_file=key, ca_file=ca), is_server=True)
    server = await serve("127.0.0.1", 0, security=MutualTls(files=files, peer_names=("peer.example",)))
    print(server.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    asyncio.run(main())
