# SPDX-License-Identifier: Apache-2.0
"""A metaserver beside one D, whose requests name their P in a header."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.front.speech import understood

from unit.router.cluster import FakeCluster, cluster, until
from unit.router.fake_engine import FakeEngine
from vllm_ascend_pd.cli.__main__ import parser
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router import named
from vllm_ascend_pd.router.command import settings_of
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, Evidence, Role
from vllm_ascend_pd.router.fleet import NAMED, Fleet, parse_spec
from vllm_ascend_pd.router.intake import NotTaken
from vllm_ascend_pd.router.metrics import METRICS, PREFIX
from vllm_ascend_pd.router.named import HEADER, Allowed, Named

# ---- which addresses


@pytest.mark.parametrize(
    ("allowed", "address", "holds"),
    [
        ("10.0.0.0/8", "10.1.2.3:8000", True),
        ("10.0.0.0/8", "11.1.2.3:8000", False),
        ("10.0.0.0/8:8000", "10.1.2.3:8000", True),
        ("10.0.0.0/8:8000", "10.1.2.3:8001", False),
        ("10.1.2.3", "10.1.2.3:9", True),
        ("10.1.2.3:9", "https://10.1.2.3:9", True),
        ("prefill-1", "PREFILL-1:8000", True),
        ("prefill-1", "prefill-10:8000", False),
        ("10.0.0.0/8", "prefill-1:8000", False),
        ("fd00::/8", "[fd12::1]:8000", True),
        ("[fd00::/8]:8000", "[fd12::1]:8001", False),
        ("[fd12::1]:8001", "[fd12::1]:8001", True),
        ("0.0.0.0/0", "[fd12::1]:8001", False),
        ("10.0.0.0/8", "10.1.2.3.evil.example:80", False),
    ],
)
def test_an_address_is_allowed_by_its_host_or_network_and_port(allowed: str, address: str, holds: bool) -> None:
    assert Allowed.parse(allowed).holds(parse_spec(Role.PREFILL, address)) is holds


@pytest.mark.parametrize(
    "text", ["", ":8000", "host:", "host:0", "host:70000", "host:x", "10.0.0.0/33", "[fd00::/8]x", "[]:1"]
)
def test_what_is_no_host_and_no_network_is_said_at_the_start(text: str) -> None:
    words = ["sidecar", "--decode", "127.0.0.1:8200", "--prefill-allowed", "10.0.0.0/8", text]
    with pytest.raises(ConfigError, match="--prefill-allowed"):
        settings_of(parser().parse_args(words))


def test_a_sidecar_has_one_d_and_no_list_of_p() -> None:
    settings = settings_of(parser().parse_args(["sidecar", "--decode", "127.0.0.1:8200", "--prefill-allowed", "p"]))
    assert settings.sidecar and settings.workers == 1 and not settings.prefill
    assert settings.decode == ("127.0.0.1:8200",) and settings.prefill_allowed == ("p",)
    for lacking in (["--decode", "x:1"], ["--prefill-allowed", "x"]):
        with pytest.raises(SystemExit):
            parser().parse_args(["sidecar", *lacking])


@given(st.binary(max_size=60).filter(lambda value: b"," not in value))
def test_whatever_the_header_says_it_is_an_address_or_refused(value: bytes) -> None:
    fleet = Fleet(CircuitPolicy())
    try:
        names = Named(fleet, ["127.0.0.0/8"]).of([(HEADER, value)])
    except NotTaken as refused:
        assert refused.answer.status in (400, 403) and not list(fleet)
    else:
        assert len(names) == len(list(fleet)) == bool(value.decode("latin-1").strip())


def test_no_more_are_known_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "MAX_PREFILLS", 3)
    fleet = Fleet(CircuitPolicy())
    known = Named(fleet, ["127.0.0.0/8"])
    for port in (1, 2, 3, 1, 4):
        known.of([(HEADER, b"127.0.0.1:%d" % port)])
    assert sorted(instance.origin.port for instance in fleet) == [1, 3, 4], "2 was not named for longest"
    assert len(known.of([(HEADER, b",".join(b"127.0.0.1:%d" % port for port in range(1, 40)))])) == named.MAX_OF_ONE


def test_a_p_that_is_not_named_any_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "KEPT_S", 0.0)
    monkeypatch.setattr(named, "_LOOK_EVERY_S", 0.0)
    fleet = Fleet(CircuitPolicy())
    known = Named(fleet, ["127.0.0.0/8"])
    known.of([(HEADER, b"127.0.0.1:1")])

    async def until_gone() -> None:
        running = asyncio.create_task(known.run())
        while list(fleet):
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(asyncio.wait_for(until_gone(), 20))
    known.of([(HEADER, b"127.0.0.1:1")])
    assert len(list(fleet)) == 1


def test_names_that_nobody_answers_for_push_out_no_p_that_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers can name addresses without end. Each is probed, so only a few are kept until they answer."""
    monkeypatch.setattr(named, "MAX_SILENT", 3)
    fleet = Fleet(CircuitPolicy())
    known = Named(fleet, ["127.0.0.0/8"])
    known.of([(HEADER, b"127.0.0.1:1")])
    (answered,) = fleet
    fleet.record(answered, Evidence.PROBE_OK)
    for port in range(2, 100):
        known.of([(HEADER, b"127.0.0.1:%d" % port)])
    assert sorted(instance.origin.port for instance in fleet) == [1, 97, 98, 99]


def test_what_an_operator_added_stays_though_requests_stop_naming_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "MAX_SILENT", 1)
    fleet = Fleet(CircuitPolicy())
    fleet.add(parse_spec(Role.PREFILL, "127.0.0.1:1"), "admin")
    known = Named(fleet, ["127.0.0.0/8"])
    for port in (1, 2, 3):
        known.of([(HEADER, b"127.0.0.1:%d" % port)])
    assert sorted(instance.origin.port for instance in fleet) == [1, 3]
    fleet.add(parse_spec(Role.PREFILL, "127.0.0.1:3"), "admin")  # which a request has named before
    known.of([(HEADER, b"127.0.0.1:4")])
    assert {i.origin.port: i.source for i in fleet} == {1: "admin", 3: "admin", 4: NAMED}


# ---- in the service


@contextmanager
def sidecar(
    prefill: int = 2, allowed: str = "127.0.0.0/8", **settings: Any
) -> Iterator[tuple[FakeCluster, list[FakeEngine]]]:
    prefills = [FakeEngine(f"named-{i}") for i in range(prefill)]
    try:
        with cluster(prefill=0, sidecar=True, prefill_allowed=(allowed,), **settings) as c:
            until(lambda: c.http.get("/readiness").status_code == 200)
            yield c, prefills
    finally:
        for engine in prefills:
            engine.stop()


def ask(c: FakeCluster, *prefills: FakeEngine, **more: Any) -> httpx.Response:
    body = {"model": "fake", "prompt": "a prompt", "max_tokens": 3, **more}
    header = {HEADER.decode(): ", ".join(engine.address for engine in prefills)} if prefills else {}
    return c.http.post("/v1/completions", json=body, headers=header)


def legs(engines: list[FakeEngine]) -> list[int]:
    return [len(engine.generations()) for engine in engines]


def test_a_request_is_prefilled_where_its_header_says() -> None:
    with sidecar() as (c, (one, two)):
        for _ in range(3):
            assert ask(c, two).status_code == 200
        assert ask(c, one).status_code == 200
        assert legs([one, two]) == [1, 3] and not c.decode[0].local_prefills
        listed = {i["name"]: i["source"] for i in c.http.get("/instances").json()["instances"]}
        assert listed == {one.address: "header", two.address: "header", c.decode[0].address: "flag"}


def test_without_the_header_d_prefills_by_itself() -> None:
    with sidecar(without_prefill="refuse") as (c, prefills):
        assert ask(c).status_code == 200 and legs(prefills) == [0, 0]
        assert "kv_transfer_params" not in c.decode[0].generations()[-1].body


def test_a_stream_that_its_d_drops_goes_on_there() -> None:
    with sidecar() as (c, (one, two)):
        (d,) = c.decode
        d.behaviour.speaks, d.behaviour.drops_after, d.behaviour.gap_s = True, 7, 0.005
        answer = understood(ask(c, two, prompt=[1, 2, 3], stream=True, max_tokens=30, min_tokens=30).content)
        assert "error" not in answer and answer["finish"][0] == "length"
        continues = [s.body["kv_transfer_params"].get("continue", False) for s in d.generations()]
        assert continues == [False] + [True] * 4 and legs([one, two]) == [0, 5] and not d.local_prefills


def test_an_address_that_is_not_allowed_is_never_called_and_the_request_is_counted() -> None:
    def refused() -> float:
        labels = {"route": "/v1/completions", "status": "403"}
        return METRICS.registry.get_sample_value(PREFIX + "requests_total", labels) or 0.0

    before = refused()
    with sidecar(allowed="127.0.0.1:9") as (c, prefills):
        answer = ask(c, prefills[0])
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "PD-META-032"
        assert refused() == before + 1
        assert legs(prefills) == [0, 0] and not c.decode[0].generations()


def test_of_those_that_are_named_another_is_asked_when_one_is_down() -> None:
    with sidecar() as (c, (one, two)):
        one.served.kill()
        for _ in range(4):
            assert ask(c, one, two).status_code == 200
        assert legs([two]) == [4] and not c.decode[0].local_prefills


def test_one_that_is_down_costs_the_request_nothing_but_the_overlap() -> None:
    with sidecar() as (c, (one, two)):
        one.served.kill()
        assert ask(c, one).status_code == 200
        assert c.decode[0].local_prefills == 1 and legs([two]) == [0], "no P is asked that was not named"


def series(c: FakeCluster) -> list[str]:
    """Return the series of P's on the page of metrics."""
    page = c.http.get("/metrics").text
    return sorted(re.findall(r'^(\w+\{[^}]*(?:role|prefill)="[^}]*\}) ', page, re.MULTILINE))


def ended(c: FakeCluster, pairs: int) -> bool:
    """Return whether so many pairs have moved KV, and no leg is under way."""
    return len(c.worker.fleet.proven()) == pairs and not any(instance.requests for instance in c.worker.fleet)


def test_callers_make_no_series_and_unread_requests_name_no_p() -> None:
    with sidecar(prefill=4) as (c, prefills):
        for engine in prefills[:2]:
            assert ask(c, engine).status_code == 200
        until(lambda: ended(c, 2))
        before, known = series(c), len(list(c.worker.fleet))
        for i in range(40):
            names = ", ".join(f"127.0.{i}.{n}:9" for n in range(16))
            answer = c.http.post("/v1/completions", content=b"{", headers={HEADER.decode(): names})
            assert answer.status_code == 400
        assert len(list(c.worker.fleet)) == known, "nothing is known of what came with a body that is no request"
        for engine in prefills[2:]:
            assert ask(c, engine).status_code == 200
        until(lambda: ended(c, 4))
        assert series(c) == before, "P's that requests name are one in the metrics"
        assert not any(engine.address in one for engine in prefills for one in before)
