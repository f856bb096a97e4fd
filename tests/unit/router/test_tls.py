# SPDX-License-Identifier: Apache-2.0
"""TLS between D and its metaserver, and between the metaserver and its engines: verified unless it is switched off."""

from __future__ import annotations

import http.server
import queue
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.kits.certificates import certificate
from vllm_ascend_pd.config import MetaserverConfig
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient, Outcome
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.router.upstream import Upstream
from vllm_ascend_pd.shared.core.failures import UpstreamError
from vllm_ascend_pd.shared.http_session import Origin
from vllm_ascend_pd.shared.loop import LoopThread

LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def mine(folder: Path) -> tuple[Path, Path]:
    return certificate(folder, "mine", LOOPBACK)


@pytest.fixture(scope="module")
def elsewhere(folder: Path) -> tuple[Path, Path]:
    """A certificate of another address, which is not valid here."""
    return certificate(folder, "elsewhere", "127.0.0.9")


class TlsServer:
    """Answer every POST with 200; with `ca`, only to clients with a certificate of it."""

    def __init__(self, certificate: tuple[Path, Path], ca: Path | None = None) -> None:
        class AgreeingHandler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        if ca is not None:
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
        self._http = http.server.ThreadingHTTPServer((LOOPBACK, 0), AgreeingHandler)
        self._http.daemon_threads = True
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, name="tls", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("tls-loop")
    yield thread
    thread.stop()


def _asked(loop: LoopThread, port: int, **config: object) -> Outcome:
    """Return the outcome of one reservation."""
    url, outcomes, ended = f"https://{LOOPBACK}:{port}", [], threading.Event()

    def outcome(_: object, said: Outcome) -> None:
        outcomes.append(said)
        ended.set()

    client = MetaserverClient(MetaserverConfig(metaserver_urls=(url,), **config), loop, outcome)  # type: ignore[arg-type]
    client.reserve("k", url, {}, 20.0)
    assert ended.wait(20)
    loop.call(client.close(), 5.0)
    return outcomes[0]


def test_d_trusts_a_metaserver_of_its_own_authority(loop: LoopThread, mine: tuple[Path, Path]) -> None:
    server = TlsServer(mine)
    assert _asked(loop, server.port, tls_ca_file=str(mine[0])).kind == "prefilled"
    server.stop()


def test_d_verifies_unless_it_is_configured_not_to(
    loop: LoopThread, mine: tuple[Path, Path], elsewhere: tuple[Path, Path]
) -> None:
    server = TlsServer(mine)
    unknown = _asked(loop, server.port)
    assert unknown.kind == "failed" and unknown.failure is not None and unknown.failure.code == "PD-META-002"
    assert _asked(loop, server.port, tls_verify=False).kind == "prefilled"
    server.stop()
    untrusted = TlsServer(elsewhere)
    named = _asked(loop, untrusted.port, tls_ca_file=str(elsewhere[0]))
    assert named.failure is not None, "a known authority, for another address"
    assert named.failure.code == "PD-META-002"
    untrusted.stop()


def test_d_shows_a_certificate_where_one_is_wanted(loop: LoopThread, mine: tuple[Path, Path], folder: Path) -> None:
    cert, key = certificate(folder, "engine", LOOPBACK)
    server = TlsServer(mine, ca=cert)
    shown = {"tls_cert_file": str(cert), "tls_key_file": str(key)}
    assert _asked(loop, server.port, tls_ca_file=str(mine[0]), **shown).kind == "prefilled"
    assert _asked(loop, server.port, tls_ca_file=str(mine[0])).kind == "failed"
    server.stop()


def test_certificates_that_are_replaced_are_used_from_the_next_connection_on(
    loop: LoopThread, mine: tuple[Path, Path], folder: Path, tmp_path: Path
) -> None:
    """The key comes a moment after its certificate: until both are there, D goes on with those of before."""
    old, new = (certificate(folder, name, LOOPBACK) for name in ("old", "new"))
    shown, key = tmp_path / "shown.pem", tmp_path / "shown.key"
    authority = tmp_path / "authorities.pem"
    authority.write_bytes(mine[0].read_bytes())
    servers = {name: TlsServer(mine, ca=pair[0]) for name, pair in (("old", old), ("new", new))}
    outcomes: queue.Queue[Outcome] = queue.Queue()
    urls = {name: f"https://{LOOPBACK}:{server.port}" for name, server in servers.items()}
    files = {"tls_ca_file": str(authority), "tls_cert_file": str(shown), "tls_key_file": str(key)}
    config = MetaserverConfig(metaserver_urls=tuple(urls.values()), **files)
    client = MetaserverClient(config, loop, lambda _, outcome: outcomes.put(outcome))

    def kinds(attempt: int) -> tuple[str, str]:
        """Return what comes of a call to the server that takes the old certificate, and to the other one."""
        outcome_kinds = []
        for name, url in urls.items():
            client.reserve((name, attempt), url, {}, 20.0)
            outcome_kinds.append(outcomes.get(timeout=30).kind)
        return outcome_kinds[0], outcome_kinds[1]

    try:
        replace_file(shown, old[0])
        replace_file(key, old[1])
        assert kinds(1) == ("prefilled", "failed")
        replace_file(shown, new[0])
        assert kinds(2) == ("prefilled", "failed")
        replace_file(key, new[1])
        assert kinds(3) == ("failed", "prefilled")
    finally:
        loop.call(client.close(), 5.0)
        for server in servers.values():
            server.stop()


def replace_file(path: Path, by: Path) -> None:
    """Put a copy in the place of a file at once, as tools that renew certificates do."""
    beside = path.with_suffix(".next")
    beside.write_bytes(by.read_bytes())
    beside.replace(path)


async def test_authorities_that_are_replaced_are_used_from_the_next_connection_on(
    mine: tuple[Path, Path], elsewhere: tuple[Path, Path], tmp_path: Path
) -> None:
    authority = tmp_path / "authorities.pem"
    replace_file(authority, elsewhere[0])
    server, upstream = TlsServer(mine), Upstream(5.0, 5.0, Settings(engine_ca=str(authority)).engine_tls())
    origin = Origin("https", LOOPBACK, server.port)
    with pytest.raises(UpstreamError, match="certificate verify failed"):
        await upstream.ask(origin, "POST", b"/", [], b"{}", 5.0).head()
    replace_file(authority, mine[0])
    async with upstream.ask(origin, "POST", b"/", [], b"{}", 5.0) as reply:
        assert await reply.rest(10) == b"{}"
    await upstream.close()
    server.stop()


async def test_the_metaserver_verifies_its_engines(mine: tuple[Path, Path], elsewhere: tuple[Path, Path]) -> None:
    """It cannot be switched off; without --engine-ca the system's authorities count."""
    for shown, ca, good in ((mine, mine[0], True), (mine, None, False), (elsewhere, elsewhere[0], False)):
        server = TlsServer(shown)
        upstream = Upstream(5.0, 5.0, Settings(engine_ca=str(ca) if ca else "").engine_tls())
        asked = upstream.ask(Origin("https", LOOPBACK, server.port), "POST", b"/", [], b"{}", 5.0)
        if good:
            async with asked as reply:
                assert await reply.rest(10) == b"{}"
        else:
            with pytest.raises(UpstreamError, match="certificate verify failed"):
                await asked.head()
        await upstream.close()
        server.stop()
