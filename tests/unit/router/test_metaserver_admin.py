# SPDX-License-Identifier: Apache-2.0
"""Operators' view and control: instances by API and by file, state, metrics, and access control."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from unit.router.cluster import FakeCluster, cluster, texts, until
from unit.router.fake_engine import words
from vllm_ascend_pd import __version__
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router import admin, instances_file
from vllm_ascend_pd.router.app import WorkerProcess
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, Role
from vllm_ascend_pd.router.fleet import Instance, parse_spec, parse_specs
from vllm_ascend_pd.router.hub import Hub
from vllm_ascend_pd.router.instances_file import Members
from vllm_ascend_pd.router.settings import Settings, read_token
from vllm_ascend_pd.router.state import sum_of

TOKEN = "a-token-of-enough-length"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def instances(c: FakeCluster) -> dict[str, dict[str, Any]]:
    return {i["name"]: i for i in c.http.get("/instances").json()["instances"]}


def test_an_instance_is_listed_with_all_that_an_operator_needs() -> None:
    with cluster() as c:
        (facts,) = [i for i in instances(c).values() if i["role"] == "decode"]
        assert facts["state"] == "ready" and facts["port"] == c.decode[0].served.port
        assert {"host", "weight", "source", "last_error", "tokens_in_flight", "requests"} <= set(facts)


def test_an_added_instance_serves_and_a_removed_one_finishes_what_it_has() -> None:
    with cluster(prefill=2) as c:
        spare = c.prefill[1]
        assert c.http.delete(f"/instances/{spare.address}").status_code == 200
        assert spare.address not in instances(c)
        answer = c.http.post("/instances", json={"role": "prefill", "url": spare.served.url, "weight": 1000})
        assert answer.status_code == 201 and answer.json()["source"] == "admin"
        until(lambda: instances(c)[spare.address]["state"] == "ready")  # else it is not chosen while others are ready
        c.complete("x")
        assert len(spare.generations()) == 1
        spare.behaviour.prefill_s = 0.5
        got: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: got.append(c.complete("y")), name="client")
        asking.start()
        until(lambda: len(spare.generations()) == 2)
        c.http.delete(f"/instances/{spare.address}")
        asking.join()
        assert got[0].status_code == 200 and not c.decode[0].local_prefills
        until(lambda: spare.generations()[1].finished)  # D may have answered before P


def test_a_draining_instance_finishes_and_takes_nothing_new() -> None:
    with cluster(decode=2) as c:
        for engine in c.decode:
            engine.behaviour.paused = True
        with c.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 3}) as answer:
            until(lambda: any(d.generations() for d in c.decode))
            busy = next(d for d in c.decode if d.generations())
            operation = c.http.post(f"/instances/{busy.address}/drain", json={})
            assert operation.json()["state"] == "draining" and operation.json()["requests"] == 1
            for engine in c.decode:
                engine.behaviour.paused = False
            for i in range(5):
                assert c.complete(f"p{i}").status_code == 200
            assert b"[DONE]" in answer.read()
        assert len(busy.generations()) == 1
        assert c.http.post(f"/instances/{busy.address}/undrain", json={}).json()["state"] == "ready"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"role": "prefill"}, 400),
        ({"role": "king", "url": "h:1"}, 400),
        ({"role": "prefill", "url": "ftp://h:1"}, 400),
        ({"role": "prefill", "url": "http://u@h:1"}, 400),
        ({"role": "prefill", "url": "h:1", "weight": -1}, 400),
        ({"role": "prefill", "url": ["h:1"]}, 400),
        ({"role": "prefill", "url": "h:1", "weigth": 3}, 400),
        ([], 400),
    ],
)
def test_what_cannot_be_an_instance_is_refused(one: FakeCluster, body: Any, status: int) -> None:
    answer = one.http.post("/instances", json=body)
    assert answer.status_code == status and answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def one() -> Any:
    with cluster() as c:
        yield c


def test_an_unknown_key_of_an_instance_is_named(one: FakeCluster) -> None:
    answer = one.http.post("/instances", json={"role": "prefill", "url": "h:1", "weigth": 3, "port": 1})
    assert answer.status_code == 400 and "'port'" in answer.json()["error"]["message"]
    assert "h:1" not in instances(one)


def test_one_name_has_one_role(one: FakeCluster) -> None:
    body = {"role": "decode", "url": one.prefill[0].address}
    assert one.http.post("/instances", json=body).status_code == 409


def test_unknown_names_and_operations_are_404(one: FakeCluster) -> None:
    assert one.http.delete("/instances/h:1").status_code == 404
    assert one.http.post("/instances/h:1/drain", json={}).status_code == 404
    assert one.http.post(f"/instances/{one.prefill[0].address}/explode", json={}).status_code == 404


def test_a_web_page_cannot_change_anything(one: FakeCluster) -> None:
    form = one.http.post(
        "/instances", content=b'{"role":"prefill","url":"h:1"}', headers={"content-type": "text/plain"}
    )
    assert form.status_code == 415
    rebound = one.http.get("/instances", headers={"host": "evil.example"})
    assert rebound.status_code == 403


def test_the_name_of_a_type_has_no_case(one: FakeCluster) -> None:
    kind = {"content-type": "Application/JSON; charset=UTF-8"}
    assert one.http.post("/instances", content=b'{"role":"prefill","url":"h:1"}', headers=kind).status_code == 201
    assert one.http.delete("/instances/h:1").status_code == 200


@pytest.mark.parametrize("path", ["/instances", "/status"])
def test_with_a_token_everybody_must_bear_it(path: str) -> None:
    with cluster(admin_token=TOKEN) as c:
        assert c.http.get(path).status_code == 401
        assert c.http.get(path, headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401
        assert c.http.get(path, headers=BEARER).status_code == 200
        assert c.http.post("/instances", json={"role": "prefill", "url": "h:1"}).status_code == 401
        assert c.http.get("/health").status_code == c.http.get("/metrics").status_code == 200


def test_status_shows_stages_and_no_prompts(one: FakeCluster) -> None:
    one.complete("a secret prompt")
    until(lambda: one.http.get("/status").json()["last"])
    status = one.http.get("/status").json()
    assert "secret" not in json.dumps(status)
    stages = [s["stage"] for s in status["last"][-1]["stages"]]
    of_p = [stages.pop(stages.index("prefilled"))] if "prefilled" in stages else []  # P's answer may come at any time
    assert stages == ["decode", "reserved", "prefill", "loaded", "first byte", "end"] and len(of_p) <= 1


def test_the_instances_file_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances_file, "_LOOK_EVERY_S", 0.05)
    file = tmp_path / "instances.yaml"
    file.write_text("prefill: []\ndecode: []\n")
    with cluster(instances_file=str(file)) as c:
        before = set(instances(c))
        file.write_text("prefill:\n  - http://h1:1\n  - {url: 'h2:2', weight: 2}\ndecode: ['h3:3+2']\n")
        until(lambda: set(instances(c)) == {*before, "h1:1", "h2:2", "h3:3", "h3:4"})
        assert instances(c)["h2:2"]["weight"] == 2 and instances(c)["h2:2"]["source"] == "file"
        file.write_text("prefill: [h1:1\n")
        until(lambda: c.http.get("/status").json()["file_error"])
        assert "h1:1" in instances(c)  # a bad file changes nothing
        replacement = tmp_path / "new"
        replacement.write_text("decode: [h3:3, h1:1]\n")
        replacement.replace(file)
        until(lambda: set(instances(c)) == {*before, "h3:3", "h1:1"})
        assert instances(c)["h1:1"]["role"] == "decode" and not c.http.get("/status").json()["file_error"]


def test_the_instances_file_takes_nothing_away_from_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances_file, "_LOOK_EVERY_S", 0.05)
    file = tmp_path / "instances.yaml"
    file.write_text("decode: [h3:3]\n")
    with cluster(instances_file=str(file)) as c:
        flag = c.prefill[0].address
        file.write_text(f"decode: ['{flag}', 'h4:4']\n")
        until(lambda: flag in c.http.get("/status").json()["file_error"])  # an earlier read may find half of the file
        problem = c.http.get("/status").json()["file_error"]
        assert "PD-CONF-007" in problem and str(file) in problem
        assert (instances(c)[flag]["role"], instances(c)[flag]["source"]) == ("prefill", "flag")
        assert "h3:3" in instances(c) and "h4:4" not in instances(c), "a bad file changes nothing"
        file.write_text("decode: [h4:4]\n")
        until(lambda: "h4:4" in instances(c))
        assert flag in instances(c) and not c.http.get("/status").json()["file_error"]


def test_a_file_that_takes_a_flags_instance_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "instances.yaml"
    file.write_text("decode: [h1:1]\n")
    with pytest.raises(ConfigError, match=r"PD-CONF-007.*h1:1.*flag"):
        WorkerProcess(Settings(prefill=("h1:1",), decode=("h2:2",), instances_file=str(file)), "http://127.0.0.1:1")


def test_what_the_admin_removes_of_the_file_comes_back_when_it_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances_file, "_LOOK_EVERY_S", 0.05)
    file = tmp_path / "instances.yaml"
    file.write_text("decode: [h3:3]\n")
    with cluster(instances_file=str(file)) as c:
        assert c.http.delete("/instances/h3:3").status_code == 200
        assert "h3:3" not in instances(c)
        file.write_text("decode: [h3:3, h4:4]\n")
        until(lambda: {"h3:3", "h4:4"} <= set(instances(c)))


@pytest.mark.parametrize("text", ["h:99999", "h:x", "http://[::1", "h:0", "h/path", "h:1+0", "h:65535+2", "a..b:1", ""])
def test_an_address_that_cannot_be_used_is_named_in_its_error(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_specs(Role.PREFILL, text)


def test_a_worker_outlives_an_operation_that_its_file_contradicts() -> None:
    fleet = Members(CircuitPolicy())
    fleet.add(parse_spec(Role.DECODE, "h:1"), "file")
    hub = Hub(0)
    hub.attach(fleet, lambda details: {})
    hub._receive({"operation": {"op": "add", "name": "h:1", "role": "prefill", "url": "h:1", "weight": 1.0}})
    assert [(i.name, i.role) for i in fleet] == [("h:1", Role.DECODE)]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "prefil: []", "prefill: h:1", "prefill: [{url: h:1, wait: 1}]", "prefill: [1]", "prefill: [h:1, h:1]",
     "prefill: [h:1]\ndecode: [h:1]", "prefill: [{url: h:1, weight: 0}]", "{", "prefill: " + "[" * 5000,
     "prefill: !!bool maybe", 'prefill: !!int ""', "prefill: !!timestamp soon", "prefill: [h:1] # \x00"],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_wrong_instances_file_names_itself(tmp_path: Path, text: str) -> None:
    file = tmp_path / "instances.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"PD-CONF-007.*instances\.yaml"):
        instances_file.read(str(file))


def test_metrics_count_what_happened() -> None:
    with cluster() as c:
        before = _samples(c.http.get("/metrics").text)
        c.complete("x")
        c.complete("y", stream=True)
        c.complete(model="another")

        def grown(name: str, **labels: str) -> float:
            key = (f"ascend_pd_metaserver_{name}", tuple(sorted(labels.items())))
            after = _samples(c.http.get("/metrics").text)
            return after.get(key, 0.0) - before.get(key, 0.0)

        # D may have answered the client before P's own answer has come
        until(lambda: grown("legs_total", role="prefill", engine=c.prefill[0].address, end="served") == 2)
        assert grown("requests_total", route="/v1/completions", status="200") == 2
        assert grown("requests_total", route="/v1/completions", status="404") == 1
        until(lambda: grown("legs_total", role="decode", engine=c.decode[0].address, end="served") == 3)
        assert grown("reservations_total", end="prefilled") == 2
        assert grown("ttft_seconds_count", route="/v1/completions") == 3


@pytest.mark.parametrize("kept", [False, True], ids=["not kept", "kept"])
@pytest.mark.parametrize(
    ("behaviour", "end"),
    [({}, "served"), ({"torn_at_end": True}, "served"), ({"break_after": 1}, "broke"), ({"drops_after": 1}, "dropped"),
     ({"status": 503}, "refused"), ({"empty": True}, "broke")],
    ids=str,
)  # fmt: skip
def test_each_request_to_an_engine_is_counted_once_by_its_end(behaviour: dict[str, Any], end: str, kept: bool) -> None:
    with cluster() as c:
        (d,) = c.decode
        for name, value in {"speaks": kept, **behaviour}.items():
            setattr(d.behaviour, name, value)
        before = _samples(c.http.get("/metrics").text)
        c.complete([1, 2, 3], stream=True, **({"temperature": 0, "max_tokens": 5} if kept else {}))

        def counted() -> dict[str, float]:
            """Return by its end how often D was asked."""
            legs = {
                dict(labels)["end"]: value - before.get((name, labels), 0.0)
                for (name, labels), value in _samples(c.http.get("/metrics").text).items()
                if name == "ascend_pd_metaserver_legs_total" and dict(labels)["engine"] == d.address
            }
            return {end: count for end, count in legs.items() if count}

        until(lambda: sum(counted().values()) == len(d.generations()))
        goes_on = kept and bool({"break_after", "drops_after"} & behaviour.keys())  # by a token each time, to its end
        ends = counted()
        if goes_on and end == "dropped":  # its one token and the end may come at once: the next D goes on behind it
            assert ends == {"dropped": 4, "served": 1}
        assert (ends.pop("served", 0) > 0) is (goes_on or end == "served") and (ends.keys() == {end}) is (
            end != "served"
        )


def test_a_client_that_leaves_cuts_the_leg() -> None:
    with cluster() as c:
        (d,) = c.decode
        d.behaviour.hold = True
        before = _samples(c.http.get("/metrics").text)
        with c.leaving("a prompt"):
            until(d.generations)
        key = (
            "ascend_pd_metaserver_legs_total",
            tuple(sorted({"role": "decode", "engine": d.address, "end": "cut"}.items())),
        )
        until(lambda: _samples(c.http.get("/metrics").text).get(key, 0.0) - before.get(key, 0.0) == 1)
        d.behaviour.hold = False


def _samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(page)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_the_predecessors_health_page_is_there(one: FakeCluster) -> None:
    assert one.http.get("/healthcheck").json() == {"status": "ok", "prefill_instances": 1, "decode_instances": 1}


def test_resetting_the_prefix_cache_reaches_every_engine() -> None:
    with cluster(prefill=2) as c:
        answer = c.http.post("/reset_prefix_cache", json={})
        assert answer.status_code == 200 and set(answer.json()["engines"].values()) == {"200"}
        assert all(e.seen[-1].route == "/reset_prefix_cache" for e in (*c.prefill, *c.decode))
        c.prefill[0].served.kill()
        assert c.http.post("/reset_prefix_cache", json={}).status_code == 502


@pytest.mark.parametrize("role", ["do_remote_prefill", "do_remote_decode"])
def test_a_virtual_request_warms_up_the_whole_way(one: FakeCluster, role: str) -> None:
    """MindIE's warm-up: whatever its transfer parameters are, it is served like any other request, by a P and a D."""
    before = len(one.legs())
    answer = one.complete("warm up", kv_transfer_params={"do_virtual": True, role: True, "remote_host": "10.0.0.1"})
    assert answer.status_code == 200 and texts(answer) == ["".join(words("warm up", 3))]
    assert len(one.legs()) == before + 1
    params = one.decode[0].generations()[-1].body["kv_transfer_params"]
    assert "do_virtual" not in params and "remote_host" not in params


def test_headers_of_the_connection_stay_on_the_connection(one: FakeCluster) -> None:
    headers = {
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
        "te": "trailers",
        "x-end": "2",
        "x-forwarded-for": "9.9.9.9",
    }
    answer = one.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    seen = one.decode[0].generations()[-1].headers
    assert "x-hop" not in seen and "te" not in seen and seen["x-end"] == "2"
    assert seen["x-forwarded-for"] == "9.9.9.9, 127.0.0.1"
    assert answer.headers["x-request-id"] == seen["x-request-id"]


def test_a_data_parallel_rank_is_one_of_ds_and_the_metaserver_names_none_itself(one: FakeCluster) -> None:
    """vLLM answers 400 for a rank that an engine does not have, and P's ranks are not D's."""
    legs = len(one.legs())
    for given, wanted in (({"X-Data-Parallel-Rank": "7", "x-end": "2"}, "7"), ({}, None)):
        assert one.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=given).status_code == 200
        d, p = (side[0].generations()[-1].headers for side in (one.decode, one.prefill))
        assert d.get("x-data-parallel-rank") == wanted and "x-data-parallel-rank" not in p
        assert p.get("x-end") == d.get("x-end") == given.get("x-end"), "other headers go to both"
    assert len(one.legs()) == legs + 2, "P prefilled"


@pytest.mark.parametrize("make", [lambda f: None, lambda f: f.chmod(0o644), lambda f: f.write_text("short")])
def test_a_token_file_must_be_secret_and_strong(tmp_path: Path, make: Callable[[Path], object]) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    assert read_token(str(file)) == TOKEN
    make(file)
    if file.read_text() != TOKEN or file.stat().st_mode & 0o77:
        with pytest.raises(ConfigError, match="PD-SEC-004"):
            read_token(str(file))


def test_state_is_the_sum_over_workers_and_the_worst_of_them() -> None:
    def report(worker: int, state: str, requests: int, error_at: float) -> dict[str, Any]:
        facts = {"name": "h:1", "state": state, "tokens_in_flight": 10.0 * requests, "requests": requests, "served": 1}
        facts |= {"broke": 0, "last_error": f"of {worker}", "last_error_at": error_at}
        worker_facts = {
            "worker": worker,
            "url": "u",
            "deployment": "blue",
            "ready": True,
            "prefills": True,
            "proven": [],
            "canary_error": "",
            "file_error": "",
        }
        return {**worker_facts, "running": requests, "waiting": 1, "instances": [facts]}

    summed = sum_of([report(0, "ready", 2, 1.0), report(1, "down", 3, 5.0)])
    (instance,) = summed["instances"]
    assert (summed["deployment"], summed["version"]) == ("blue", __version__)
    assert (instance["state"], instance["requests"], instance["tokens_in_flight"]) == ("down", 5, 50.0)
    assert instance["last_error"] == "of 1" and (summed["running"], summed["waiting"]) == (5, 2)


def test_what_one_is_sent_makes_its_members_the_same() -> None:
    known, new, late = (Members(CircuitPolicy()) for _ in range(3))
    for fleet in (known, late):
        fleet.add(parse_spec(Role.PREFILL, "https://[::1]:1", 2.0), "file")
        fleet.add(parse_spec(Role.DECODE, "h:2"), "flag")
        fleet.add(parse_spec(Role.DECODE, "h:3"), "file")
    stays = late.get("h:2")
    known.remove("h:3")
    known.replace([parse_spec(Role.PREFILL, "h:3"), parse_spec(Role.PREFILL, "https://[::1]:1", 3.0)], "file")
    admin.apply(known, {"op": "add", "name": "h:4", "role": "decode", "url": "h:4", "weight": 5.0})
    admin.apply(known, {"op": "drain", "name": "h:2"})
    known.file_problem = "a typo"
    snapshot = json.loads(json.dumps(known.snapshot()))
    for fleet in (new, late):
        admin.apply(fleet, snapshot)
        assert [i.facts() for i in sorted(fleet, key=by_name)] == [i.facts() for i in sorted(known, key=by_name)]
        assert fleet.file_problem == "a typo"
    assert late.get("h:2") is stays


def by_name(instance: Instance) -> str:
    return instance.name


def test_an_operation_is_the_same_in_every_worker() -> None:
    fleet = Members(CircuitPolicy())
    fleet.add(parse_spec(Role.DECODE, "h:1"), "flag")
    admin.apply(fleet, {"op": "add", "name": "h:2", "role": "prefill", "url": "h:2", "weight": 2.0})
    admin.apply(fleet, {"op": "drain", "name": "h:2"})
    admin.apply(fleet, {"op": "remove", "name": "h:1"})
    admin.apply(fleet, {"op": "drain", "name": "unknown"})
    (left,) = fleet
    assert (left.name, left.weight, left.draining) == ("h:2", 2.0, True)


def test_an_instance_that_speaks_tls_now_is_another_one() -> None:
    fleet = Members(CircuitPolicy())
    plain = fleet.add(parse_spec(Role.DECODE, "http://h:1"), "file")
    assert fleet.add(parse_spec(Role.DECODE, "h:1"), "file") is plain
    fleet.replace([parse_spec(Role.DECODE, "https://h:1")], "file")
    (now,) = fleet
    assert now is not plain and now.origin.scheme == "https" and now.source == "file" and plain.draining
    admin.apply(fleet, {"op": "add", "name": "h:1", "role": "decode", "url": "http://h:1", "weight": 1.0})
    assert [i.origin.scheme for i in fleet] == ["http"]
    fleet.replace([parse_spec(Role.DECODE, "https://h:1")], "file")
    assert [(i.origin.scheme, i.source) for i in fleet] == [("http", "admin")], "one source does not remove another's"
