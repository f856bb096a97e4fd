# SPDX-License-Identifier: Apache-2.0
"""A real nginx before a server, with the lines that its users copy: WebSocket upgrades and kept connections."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.support.process import free_port

MISSING = "nginx is not installed here: apt-get install nginx-light"
_CONFIG = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream behind {{ server 127.0.0.1:{behind}; keepalive {kept}; }}
  proxy_http_version 1.1;
  proxy_set_header Host $host;
  proxy_set_header Upgrade $http_upgrade;
  proxy_set_header Connection $connection_upgrade;
  server {{ listen 127.0.0.1:{whole}; location / {{ proxy_pass http://behind; }} }}
  server {{
    listen 127.0.0.1:{pieces};
    location / {{ proxy_pass http://behind; proxy_request_buffering off; proxy_buffering off; }}
  }}
}}
"""


def executable() -> str:
    """Return its path; empty if there is none. Debian's is unpacked by scripts/setup.sh."""
    unpacked = Path(__file__).resolve().parents[2] / ".cache" / "nginx" / "usr" / "sbin"
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:{unpacked}") or ""


@contextmanager
def nginx(folder: Path, behind: int, kept: int = 4) -> Iterator[tuple[int, int]]:
    """Run nginx before a port; yield two ports of it: one sends bodies on when they are whole, one as they come."""
    whole, pieces = free_port(), free_port()
    config = folder / "nginx.conf"
    config.write_text(_CONFIG.format(folder=folder, behind=behind, kept=kept, whole=whole, pieces=pieces))
    with subprocess.Popen([executable(), "-c", str(config), "-p", str(folder)], stderr=subprocess.PIPE) as process:
        try:
            for port in (whole, pieces):
                _wait_for(process, port)
            yield whole, pieces
        finally:
            process.terminate()
            process.wait(20)


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 20).close()
            return
        except ConnectionRefusedError:
            if process.poll() is not None:
                said = process.stderr.read().decode() if process.stderr is not None else ""
                raise RuntimeError(f"nginx has ended: {said}") from None
