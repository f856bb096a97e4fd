# SPDX-License-Identifier: Apache-2.0
"""The metaserver behind a real nginx that keeps connections: no client ever gets another one's answer."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from tools.support import nginx
from unit.router.cluster import cluster
from unit.router.fake_engine import words
from unit.router.smuggled import JDK_OFFER, Attack, attacks, completion, request

pytestmark = pytest.mark.skipif(not nginx.executable(), reason=nginx.MISSING)

AT_ONCE = 64  # attacks, as many connections that nginx keeps, and as many others that get one of these next
OF_NGINX = b"<center>nginx"
_ANSWER = re.compile(rb"HTTP/1\.1 (\d+) .*?\r\ncontent-length: (\d+)\r\n.*?\r\n\r\n", re.IGNORECASE | re.DOTALL)
Cut = tuple[Attack, int]  # the offset at which its second piece begins


class OtherClient:
    """Another client, on a kept connection to nginx. It asks for what nobody has: the answer names that."""

    numbers = count()

    def __init__(self, port: int) -> None:
        self.wrong: list[str] = []
        self._socket = socket.create_connection(("127.0.0.1", port), 60)
        self._path = b""

    def close(self) -> None:
        self._socket.close()

    def ask(self) -> None:
        self._path = b"/client/%d/" % next(self.numbers)
        self._socket.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % self._path)

    def answered(self, after: Sequence[Cut]) -> None:
        """Read an answer, and note if it is not the one to the last question and nothing else."""
        said = b""
        while not (head := _ANSWER.match(said)) or len(said) < head.end() + int(head[2]):
            if not (more := self._socket.recv(1 << 16)):
                break
            said += more
        if not head or head[1] != b"404" or self._path not in said or len(said) != head.end() + int(head[2]):
            attacked = ", ".join(f"{attack.name} cut at {at}" for attack, at in after)
            self.wrong.append(f"{self._path!r} got {said[:300]!r} after {attacked}")


@contextlib.contextmanager
def other_clients(port: int) -> Iterator[list[OtherClient]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(OtherClient(port))) for _ in range(AT_ONCE)]


def asked(others: Sequence[OtherClient], after: Sequence[Cut]) -> None:
    """Let others ask. What was sent before has been taken when they have their answers."""
    for other in others:
        other.ask()
    for other in others:
        other.answered(after)


def attacked(port: int, cuts: Sequence[Cut], others: Sequence[OtherClient]) -> list[bytes]:
    """Make attacks, each in two pieces, with others behind each piece; return the beginnings of what came back."""
    said = []
    with contextlib.ExitStack() as stack:
        attackers = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in cuts]
        for second in (False, True):
            for attacker, (attack, at) in zip(attackers, cuts, strict=True):
                with contextlib.suppress(ConnectionError):  # nginx has refused the beginning
                    attacker.sendall(attack.data[at:] if second else attack.data[:at])
            asked(others[:2], cuts)
        asked(others, cuts)  # as many as may get a connection on which an answer is still to come
        for attacker in attackers:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                said.append(attacker.recv(1 << 16, socket.MSG_DONTWAIT))
                continue
            said.append(b"")
    return said


def attacked_by_all(port: int, cuts: Sequence[Cut], others: Sequence[OtherClient]) -> list[bytes]:
    """Make attacks, so many at once; return what came back. No attacker may get another client's answer either."""
    batches = [cuts[begin : begin + AT_ONCE] for begin in range(0, len(cuts), AT_ONCE)]
    said = [answer for batch in batches for answer in attacked(port, batch, others)]
    assert not [answer for answer in said if b"/client/" in answer]
    return said


@pytest.mark.parametrize("sidecar", [False, True], ids=["metaserver", "sidecar"])
def test_no_client_gets_the_answer_to_anothers_request(tmp_path: Path, sidecar: bool) -> None:
    """Attacks of each kind: whole, and cut at the head's end and before each byte of the body.

    nginx itself refuses some by their heads. Those are not cut: the server sees nothing of them.
    """
    more = {"prefill": 0, "sidecar": True} if sidecar else {}
    kinds = list(attacks())
    uncut = [(attack, len(attack.data)) for attack in kinds]
    with (
        cluster(**more) as c,
        nginx.nginx(tmp_path, c.served.port, kept=AT_ONCE) as (whole, pieces),
        other_clients(whole) as near,
        other_clients(pieces) as far,
    ):
        attacked_by_all(whole, uncut, near)
        answers = attacked_by_all(pieces, uncut, far)
        passed = [attack for attack, answer in zip(kinds, answers, strict=True) if OF_NGINX not in answer]
        assert {attack.name.split()[0] for attack in passed} >= {"upgrade", "length", "trailer", "pipelined"}
        attacked_by_all(pieces, [(attack, at) for attack in passed for at in attack.boundaries()], far)
        wrong = [said for other in (*near, *far) for said in other.wrong]
    assert not wrong, f"{len(wrong)} clients: {wrong[:3]}"


def test_a_jdk_client_that_offers_http2_is_served(tmp_path: Path) -> None:
    with cluster() as c, nginx.nginx(tmp_path, c.served.port) as ports:
        for port in (*ports, c.served.port):
            for prompt in ("first", "second"):
                with socket.create_connection(("127.0.0.1", port), 60) as client:
                    client.sendall(request(completion(prompt), JDK_OFFER))
                    answer = http.client.HTTPResponse(client)
                    answer.begin()
                    assert answer.status == 200 and "".join(words(prompt, 3)) in answer.read().decode()
