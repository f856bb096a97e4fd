# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, made by openssl."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


def certificate(folder: Path, name: str, address: str) -> tuple[Path, Path]:
    """Return the files of a new certificate for this address, which is its own authority, and of its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def server_context(files: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context
