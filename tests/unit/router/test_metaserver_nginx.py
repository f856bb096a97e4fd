# SPDX-License-Identifier: Apache-2.0
"""The metaserver behind a real nginx that keeps connections: no client ever gets another one's answer."""

from __future__ import annotations

import contextlib
import http.client
import socket
from pathlib import Path

import httpx
import pytest

from tools.support import nginx
from unit.router.cluster import cluster, texts
from unit.router.fake_engine import words
from unit.router.smuggled import COMPLETIONS, JDK_OFFER, attacks, completion, request

pytestmark = pytest.mark.skipif(not nginx.found(), reason=nginx.MISSING)


@pytest.mark.parametrize("sidecar", [False, True], ids=["metaserver", "sidecar"])
def test_no_client_gets_the_answer_to_anothers_request(tmp_path: Path, sidecar: bool) -> None:
    more = {"prefill": 0, "sidecar": True} if sidecar else {}
    wrong, asked = [], 0
    with cluster(**more) as c, nginx.nginx(tmp_path, c.served.port) as ports, contextlib.ExitStack() as open_still:
        clients = [open_still.enter_context(httpx.Client(timeout=60, trust_env=False)) for _ in ports]

        def others(after: str) -> None:
            """Ask for other clients, over each port of nginx."""
            nonlocal asked
            for client, port in zip(clients, ports, strict=True):
                asked += 1
                prompt = f"client {asked}"
                answer = client.post(
                    f"http://127.0.0.1:{port}{COMPLETIONS}", json={"model": "fake", "prompt": prompt, "max_tokens": 3}
                )
                if answer.status_code != 200 or texts(answer) != ["".join(words(prompt, 3))]:
                    wrong.append(f"after {after}: {answer.status_code} {answer.text[:200]}")

        for attack in attacks():
            if sidecar and not attack.name.startswith("upgrade"):
                continue  # the parser is the same: the rest would show nothing new
            for port in ports:
                attacker = open_still.enter_context(socket.create_connection(("127.0.0.1", port), 60))
                for piece in attack.pieces:
                    with contextlib.suppress(ConnectionError):  # nginx has refused the beginning
                        attacker.sendall(piece)
                    others(attack.name)  # and meanwhile the piece has been sent on
    assert not wrong, f"{len(wrong)} of {asked} clients: {wrong[:5]}"


def test_a_jdk_client_that_offers_http2_is_served(tmp_path: Path) -> None:
    with cluster() as c, nginx.nginx(tmp_path, c.served.port) as ports:
        for port in (*ports, c.served.port):
            for prompt in ("first", "second"):
                with socket.create_connection(("127.0.0.1", port), 60) as client:
                    client.sendall(request(completion(prompt), JDK_OFFER))
                    answer = http.client.HTTPResponse(client)
                    answer.begin()
                    assert answer.status == 200 and "".join(words(prompt, 3)) in answer.read().decode()
