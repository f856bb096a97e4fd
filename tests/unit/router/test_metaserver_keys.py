# SPDX-License-Identifier: Apache-2.0
"""Whose key engines get to see: the client's own, unless the operator lends theirs to clients that prove a key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from unit.router.cluster import FakeCluster, cluster, until
from vllm_ascend_pd.cli.__main__ import parser
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.command import settings_of
from vllm_ascend_pd.router.metrics import METRICS, PREFIX
from vllm_ascend_pd.router.named import HEADER
from vllm_ascend_pd.router.settings import read_tokens

ENGINES, CLIENT, OTHER = "the-key-of-the-engines", "the-key-of-one-client", "the-key-of-another"
ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/embeddings"]


@contextmanager
def keyed(**settings: Any) -> Iterator[FakeCluster]:
    """Start a cluster whose engines want their key, which the metaserver knows."""
    with cluster(engine_token=ENGINES, **settings) as c:
        for engine in (*c.prefill, *c.decode):
            engine.usual.key = ENGINES
        yield c


def post(c: FakeCluster, route: str, key: str = "") -> httpx.Response:
    body = {"model": "fake", "messages": [], "lora_name": "x", "lora_path": "/x"}
    body |= {"prompt": "a prompt"} if route == "/v1/completions" else {}
    return c.http.post(route, json=body, headers={"authorization": f"Bearer {key}"} if key else {})


def code(answer: httpx.Response) -> Any:
    return answer.json()["error"]["code"]


def refused(route: str) -> float:
    labels = {"route": route if route in ROUTES[:2] or route == "/v1/embeddings" else "/v1/*", "status": "401"}
    return METRICS.registry.get_sample_value(PREFIX + "requests_total", labels) or 0.0


def keys_seen(c: FakeCluster) -> set[str | None]:
    return {seen.headers.get("authorization") for engine in (*c.prefill, *c.decode) for seen in engine.seen}


@pytest.mark.parametrize("route", ROUTES)
def test_the_metaservers_key_is_not_lent_to_clients(route: str) -> None:
    with keyed() as c:
        for key in ("", CLIENT):
            answer = post(c, route, key)
            assert answer.status_code == 401 and code(answer) == 401, "the engine's own answer"
        assert c.http.get("/v1/models").status_code == 401
        assert f"Bearer {ENGINES}" not in keys_seen(c)
        assert post(c, route, ENGINES).status_code == 200, "a client that has the key itself"


def test_probes_and_canaries_have_the_key() -> None:
    with cluster(engine_token=ENGINES, canary=True) as c:
        canaries = [engine.generations()[0] for engine in (*c.prefill, *c.decode)]
        assert {seen.headers["authorization"] for seen in canaries} == {f"Bearer {ENGINES}"}
        d = c.decode[0]
        d.usual.key, d.models = ENGINES, ("another",)
        d.served.kill()
        d.served.start()  # another process by its refused probe: it is asked for its models again
        instance = c.worker.fleet.get(d.address)
        until(lambda: instance is not None and set(instance.cards or ()) == {"another"})


@pytest.mark.parametrize("route", ROUTES)
def test_the_key_is_lent_to_clients_that_bring_one_of_theirs(route: str) -> None:
    before = refused(route)
    with keyed(lend_engine_token=True, client_tokens=(OTHER, CLIENT)) as c:
        for key in ("", CLIENT[:-1], CLIENT + "x", ENGINES):
            answer = post(c, route, key)
            assert answer.status_code == 401 and code(answer) == "PD-SEC-007"
            assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
        assert refused(route) - before == 4
        assert not keys_seen(c), "none of them has reached an engine"
        assert post(c, route, CLIENT).status_code == post(c, route, OTHER).status_code == 200
        assert keys_seen(c) == {f"Bearer {ENGINES}"}, "a client's key goes no further"


def test_a_second_authorization_does_not_come_along_with_an_accepted_one() -> None:
    with keyed(client_tokens=(CLIENT,)) as c:
        two = [("authorization", f"Bearer {CLIENT}"), ("authorization", f"Bearer {ENGINES}")]
        for headers in (two, two[::-1], [("authorization", CLIENT)], [("authorization", f"Basic {CLIENT}")]):
            answer = c.http.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and code(answer) == "PD-SEC-007"
        answer = c.http.get("/v1/models", headers={"authorization": f"bearer {CLIENT}"})
        assert answer.status_code == 401 and code(answer) == 401, "asked for, and not lent: the engine wants its own"


def test_on_loopback_clients_without_authorization_are_lent_the_key() -> None:
    with keyed(lend_engine_token=True) as c:
        assert post(c, ROUTES[0]).status_code == 200
        assert code(post(c, ROUTES[0], CLIENT)) == 401, "what a client brings itself is not replaced"


def test_what_does_not_reach_an_engine_asks_for_no_clients_key() -> None:
    with keyed(lend_engine_token=True, client_tokens=(CLIENT,)) as c:
        for path in ("/health", "/healthcheck", "/serving", "/readiness", "/metrics", "/status"):
            assert c.http.get(path).status_code == 200
        assert post(c, ROUTES[0], CLIENT).status_code == 200, "D's posts, which have its ticket, are no client's"
        assert len(c.legs()) == 1
        until(c.worker.fleet.proven)  # and its report
        seen = len(c.decode[0].seen)
        assert c.http.options("/v1/completions").status_code == 200
        assert "authorization" not in c.decode[0].seen[seen].headers, "a preflight has no key, and gets none"


def test_a_p_that_a_request_names_is_not_probed_with_the_key() -> None:
    """Everyone who reaches a sidecar can name a P in the allowed network, a process of one's own too."""
    with cluster(prefill=0, decode=2, sidecar=True, prefill_allowed=("127.0.0.0/8",), engine_token=ENGINES) as c:
        d, p = c.decode
        c.worker.fleet.remove(p.address)
        p.usual.key = ENGINES
        c.http.post("/v1/completions", json={"prompt": "x"}, headers={HEADER.decode(): p.address})
        until(lambda: (named := c.worker.fleet.get(p.address)) is not None and named.cards is not None)
        named = c.worker.fleet.get(p.address)
        assert named is not None and named.cards == {}, "it was asked without the key, so it has listed nothing"
        assert set((c.worker.fleet.get(d.address) or named).cards or ()) == {"fake"}


# ---- at the start


def token_file(tmp_path: Path, *words: str) -> str:
    file = tmp_path / f"token-{len(list(tmp_path.iterdir()))}"
    file.write_text("\n".join(words))
    file.chmod(0o600)
    return str(file)


def start(*words: str, command: str = "metaserver") -> Any:
    needed = ["--decode", "d:1", "--prefill-allowed", "p"] if command == "sidecar" else []
    return settings_of(parser().parse_args([command, *needed, *words]))


@pytest.mark.parametrize("command", ["metaserver", "sidecar"])
def test_a_key_is_not_lent_where_strangers_can_call(tmp_path: Path, command: str) -> None:
    lending = ["--lend-engine-token", "--engine-token-file", token_file(tmp_path, ENGINES)]
    for host in ("0.0.0.0", "::", "10.0.0.1", "192.0.2.1"):
        with pytest.raises(ConfigError, match=r"--lend-engine-token.*--client-token-file"):
            start(*lending, "--host", host, command=command)
        keys = token_file(tmp_path, CLIENT, OTHER)
        settings = start(*lending, "--host", host, "--client-token-file", keys, command=command)
        assert settings.lend_engine_token and settings.client_tokens == (CLIENT, OTHER)
    for host in ("127.0.0.1", "::1", "localhost"):
        assert start(*lending, "--host", host, command=command).lend_engine_token


def test_without_a_key_there_is_nothing_to_lend() -> None:
    with pytest.raises(ConfigError, match=r"--lend-engine-token.*--engine-token-file"):
        start("--lend-engine-token")


def test_a_file_of_keys_has_strong_ones_only(tmp_path: Path) -> None:
    assert read_tokens(token_file(tmp_path, CLIENT, OTHER)) == (CLIENT, OTHER)
    for words in ((CLIENT, "short"), (), ("ein-schlüssel-mit-umlaut",)):
        with pytest.raises(ConfigError, match="PD-SEC-004"):
            read_tokens(token_file(tmp_path, *words))
