# SPDX-License-Identifier: Apache-2.0
"""Instances by a Kubernetes Service, against an API that answers as recorded: lists, and watches that bring events,
end, are dropped, or are too old. The answers have the form of discovery.k8s.io/v1; no API server runs here."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from unit.docs.manifests import wrong
from unit.kits.certificates import certificate
from unit.router.cluster import cluster, until
from unit.router.fake_engine import Receive, Scope, Send, ServedApp
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router import kubernetes
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, Role
from vllm_ascend_pd.router.fleet import Fleet, parse_spec
from vllm_ascend_pd.router.kubernetes import KubernetesService, api_from
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.loop import LoopThread

Facts = dict[str, Any]


def pod(address: str, ready: bool | None = True, terminating: bool | None = None) -> Facts:
    conditions = {"ready": ready, "serving": ready, "terminating": terminating}
    return {
        "addresses": [address],
        "conditions": {name: value for name, value in conditions.items() if value is not None},
        "nodeName": "node-1",
        "targetRef": {"kind": "Pod", "name": "pd-decode-0", "namespace": "pd", "uid": "0f1d"},
    }


def slice_of(*pods: Facts, name: str = "pd-decode-x7k2p", version: int = 1, port: int = 8102) -> Facts:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "pd",
            "resourceVersion": str(version),
            "labels": {"kubernetes.io/service-name": "pd-decode"},
        },
        "addressType": "IPv4",
        "endpoints": list(pods) or None,
        "ports": ports(metrics=9, http=port),
    }


def ports(**named: int) -> list[Facts]:
    return [{"name": name, "port": port, "protocol": "TCP"} for name, port in named.items()]


DROP, END = object(), object()  # a watch whose connection is cut, and one that the API ends


@dataclass
class RecordedApi:
    """The API: `listed` answers lists, and each watch sends what is put for it."""

    listed: list[Facts] = field(default_factory=list)
    version: int = 1
    fails: int = 0  # status of the answers to come; 0: they are good
    fails_watches: int = 0
    too_old: bool = False  # of a watch to come
    lists: list[Facts] = field(default_factory=list)
    watches: list[Facts] = field(default_factory=list)
    more: str = ""
    drips: bool = False  # answers of lists have no end

    def __post_init__(self) -> None:
        self._events: asyncio.Queue[object] = asyncio.Queue()
        self.served = ServedApp(self, "kubernetes API")

    def put(self, *events: object) -> None:
        for event in events:
            self.served.loop.post(self._events.put_nowait, event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
        headers = {name: value.decode() for name, value in scope["headers"]}
        asked = {**query, "path": scope["path"], "token": headers.get(b"authorization")}
        watching = "watch" in query
        (self.watches if watching else self.lists).append(asked)
        fails = self.fails or (self.fails_watches if watching else 0)
        if fails or (watching and self.too_old):
            status, self.too_old = fails or 410, False
            body = {"kind": "Status", "status": "Failure", "code": status, "message": "as recorded"}
            await _answer(send, status, json.dumps(body).encode())
        elif self.drips:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await asyncio.sleep(0.01)
        elif not watching:
            metadata = {"resourceVersion": str(self.version), **({"continue": self.more} if self.more else {})}
            body = {"kind": "EndpointSliceList", "metadata": metadata, "items": self.listed}
            await _answer(send, 200, json.dumps(body).encode())
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            while (event := await self._events.get()) not in (DROP, END):
                line = event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
                for half in (line[:20], line[20:]):  # pieces are not lines
                    await send({"type": "http.response.body", "body": half, "more_body": True})
            if event is DROP:
                raise ConnectionAbortedError
            await send({"type": "http.response.body", "body": b""})


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


def event(kind: str, one: Facts) -> Facts:
    return {"type": kind, "object": one}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("token-one\n")
    (tmp_path / "namespace").write_text("pd")
    return tmp_path


@contextmanager
def following(api: RecordedApi, account: Path, text: str = "pd-decode:http") -> Iterator[tuple[Fleet, list[None]]]:
    fleet = Fleet(CircuitPolicy())
    changes: list[None] = []
    source = KubernetesService(Role.DECODE, text, fleet, api.served.url, str(account))
    loop = LoopThread("metaserver")
    watching = loop.submit(source.watch(lambda: changes.append(None)))
    try:
        yield fleet, changes
        assert not watching.done()
    finally:
        watching.cancel()
        loop.stop()
        api.put(END, END)
        api.served.stop()


def names(fleet: Fleet) -> set[str]:
    return {instance.name for instance in fleet}


def test_the_recorded_slices_fit_the_schema() -> None:
    for one in (slice_of(pod("10.0.0.3"), pod("10.0.0.4", ready=False, terminating=True)), slice_of()):
        assert wrong(one | {"endpoints": one["endpoints"] or []}, "") == []
    assert wrong(slice_of({"address": "10.0.0.3"}), "")


def test_the_ready_pods_of_a_service_are_instances_and_follow_it(account: Path) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3"), pod("10.0.0.4", ready=False))], version=7)
    with following(api, account) as (fleet, changes):
        until(lambda: names(fleet) == {"10.0.0.3:8102"} and len(api.watches) == 1)
        asked = api.lists[0]
        assert asked["path"] == "/apis/discovery.k8s.io/v1/namespaces/pd/endpointslices"
        assert asked["labelSelector"] == "kubernetes.io/service-name=pd-decode" and asked["token"] == "Bearer token-one"
        assert api.watches[0]["resourceVersion"] == "7"
        first = fleet.get("10.0.0.3:8102")
        assert first is not None and first.source == "service pd-decode:http" and first.role is Role.DECODE
        api.put(event("MODIFIED", slice_of(pod("10.0.0.3", ready=False), pod("10.0.0.4"), version=8)))
        until(lambda: names(fleet) == {"10.0.0.3:8102", "10.0.0.4:8102"})
        assert fleet.get("10.0.0.3:8102") is first, "unready for a moment: the metaserver's own probes decide"
        api.put(event("ADDED", slice_of(pod("10.0.0.9"), name="pd-decode-2", version=9)))
        until(lambda: "10.0.0.9:8102" in names(fleet))
        api.put(event("DELETED", slice_of(name="pd-decode-2", version=10)))
        until(lambda: "10.0.0.9:8102" not in names(fleet))
        assert len(changes) == 4


def test_a_pod_that_terminates_goes_and_one_that_comes_back_is_new(account: Path) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3"))])
    with following(api, account) as (fleet, _):
        until(lambda: names(fleet) == {"10.0.0.3:8102"})
        before = fleet.get("10.0.0.3:8102")
        api.put(event("MODIFIED", slice_of(pod("10.0.0.3", ready=False, terminating=True), version=2)))
        until(lambda: not names(fleet))
        assert before is not None and before.draining, "requests in flight finish, new ones do not come"
        api.put(event("MODIFIED", slice_of(pod("10.0.0.3", ready=False), version=3)))
        api.put(event("MODIFIED", slice_of(pod("10.0.0.3", ready=False), pod("10.0.0.5"), version=4)))
        until(lambda: names(fleet) == {"10.0.0.5:8102"})
        api.put(event("MODIFIED", slice_of(pod("10.0.0.3"), version=5)))
        until(lambda: names(fleet) == {"10.0.0.3:8102"})
        assert fleet.get("10.0.0.3:8102") is not before


@pytest.mark.parametrize(
    ("text", "slice_ports", "instance"),
    [
        ("pd-decode:http", ports(metrics=9, http=8102), "10.0.0.3:8102"),
        ("pd-decode:metrics", ports(metrics=9, http=8102), "10.0.0.3:9"),
        ("pd-decode", ports(metrics=9, http=8102), "10.0.0.3:8102"),
        ("pd-decode", ports(metrics=9, https=8443), "10.0.0.3:8443"),
        ("pd-decode", [{"name": "", "port": 8102}], "10.0.0.3:8102"),
        ("pd-decode", ports(api=8102), "10.0.0.3:8102"),
    ],
)
def test_the_port_is_the_named_one_or_the_only_one_or_http(
    account: Path, text: str, slice_ports: list[Facts], instance: str
) -> None:
    """A slice's ports are in no order."""
    api = RecordedApi([slice_of(pod("10.0.0.3")) | {"ports": slice_ports}])
    with following(api, account, text) as (fleet, _):
        until(lambda: names(fleet))
        assert names(fleet) == {instance}


@pytest.mark.parametrize("slice_ports", [ports(metrics=9, api=8102), ports(http=8102, https=8443)])
def test_of_several_ports_none_is_guessed(
    account: Path, caplog: pytest.LogCaptureFixture, slice_ports: list[Facts]
) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3")) | {"ports": slice_ports}])
    with following(api, account, "pd-decode") as (fleet, _):
        until(lambda: len(api.lists) >= 2)
        assert not names(fleet) and "several ports: name one" in caplog.text


def test_a_service_or_port_that_is_not_there_is_said_once(account: Path, caplog: pytest.LogCaptureFixture) -> None:
    api = RecordedApi()
    with caplog.at_level(logging.INFO), following(api, account, "pd-decode:htp") as (fleet, changes):
        until(lambda: "its decode instances are none" in caplog.text)
        assert "no port" not in caplog.text, "no slice says what its ports are"
        api.put(event("ADDED", slice_of(pod("10.0.0.3"), version=2)))
        until(lambda: "its decode instances are none: no port is named htp" in caplog.text)
        api.put(event("MODIFIED", slice_of(pod("10.0.0.4"), version=3)), END)
        until(lambda: len(api.watches) == 2)
        assert caplog.text.count("its decode instances are") == 2 and not names(fleet) and not changes


def test_a_pod_with_addresses_of_both_families_is_one_instance(account: Path) -> None:
    four = slice_of(pod("10.0.0.3"), version=2)
    six = slice_of(pod("fd00::3"), pod("fd00::4") | {"targetRef": {"uid": "another"}}, name="pd-decode-six")
    api = RecordedApi([six | {"addressType": "IPv6"}])
    with following(api, account) as (fleet, _):
        until(lambda: names(fleet) == {"[fd00::3]:8102", "[fd00::4]:8102"})
        api.put(event("ADDED", four))
        until(lambda: names(fleet) == {"10.0.0.3:8102", "[fd00::4]:8102"})
        leaving = slice_of(pod("10.0.0.3", ready=False, terminating=True), version=3)
        api.put(event("MODIFIED", leaving))
        until(lambda: names(fleet) == {"[fd00::4]:8102"})


@pytest.mark.parametrize("how", [DROP, END], ids=["dropped", "ended"])
def test_a_watch_that_ends_goes_on_where_it_was(account: Path, how: object) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3"))], version=3)
    with following(api, account) as (fleet, _):
        until(lambda: len(api.watches) == 1)
        bookmark = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": {"resourceVersion": "41"}}
        api.put(event("BOOKMARK", bookmark), how)
        until(lambda: len(api.watches) == 2)
        assert api.watches[1]["resourceVersion"] == "41" and len(api.lists) == 1
        assert names(fleet) == {"10.0.0.3:8102"}


@pytest.mark.parametrize("where", ["status", "event"])
def test_a_watch_that_is_too_old_begins_again_with_a_list(account: Path, where: str) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3"))], version=3)
    with following(api, account) as (fleet, _):
        until(lambda: len(api.watches) == 1)
        api.listed, api.version = [slice_of(pod("10.0.0.8"), version=90)], 90
        if where == "status":
            api.too_old = True
            api.put(END)
        else:
            gone = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"}
            api.put(event("ERROR", gone))
        until(lambda: names(fleet) == {"10.0.0.8:8102"})
        until(lambda: api.watches[-1]["resourceVersion"] == "90")


def test_while_the_api_fails_all_instances_stay_and_it_is_said_once(
    account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3"))])
    with caplog.at_level(logging.INFO), following(api, account) as (fleet, _):
        until(lambda: len(api.watches) == 1)
        api.fails = 403
        api.put(END)
        until(lambda: len(api.lists) >= 3)
        assert names(fleet) == {"10.0.0.3:8102"}
        refusals = [record.message for record in caplog.records if "cannot be used" in record.message]
        assert len(refusals) == 2 and "403" in refusals[0] and "as recorded" in refusals[1], "a watch's, and a list's"
        (account / "token").write_text("token-two")
        api.listed, api.fails = [slice_of(pod("10.0.0.4"))], 0
        until(lambda: names(fleet) == {"10.0.0.4:8102"})
        until(lambda: "the Kubernetes API answers again" in caplog.text)
        assert api.lists[-1]["token"] == "Bearer token-two"


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how many rounds without a use each delay was made; the delays themselves are short."""
    asked: list[int] = []

    class CountedBackoff(Backoff):
        def delay(self, failures: int, rand: float) -> float:
            asked.append(failures)
            return super().delay(failures, rand)

    monkeypatch.setattr(kubernetes, "_AGAIN", CountedBackoff(first_s=0.02, longest_s=0.02))
    return asked


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return whether each line about the API is of its use or its failure, in order."""
    lines = [record.message for record in caplog.records if "the Kubernetes API" in record.message]
    return ["fails" if "cannot be used" in line else "answers" for line in lines]


def test_while_no_api_is_there_the_delays_grow_and_each_reason_is_said_once(
    account: Path, caplog: pytest.LogCaptureFixture, delays: list[int]
) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3"))], version=3)
    with caplog.at_level(logging.INFO), following(api, account) as (fleet, _):
        until(lambda: len(api.watches) == 1)
        api.served.kill()
        api.put(DROP)  # to the watch that was cut: it would take what is put for the next one
        until(lambda: len(delays) >= 6)
        assert delays[:6] == [1, 2, 3, 4, 5, 6] and names(fleet) == {"10.0.0.3:8102"}
        assert said(caplog) == ["fails", "fails"], "a watch broke off, and there is no connection"
        api.served.start()
        until(lambda: said(caplog) == ["fails", "fails", "answers"])
        del delays[:]
        api.put(event("MODIFIED", slice_of(pod("10.0.0.4"), version=4)), END)
        until(lambda: delays)
        assert delays[0] == 1 and names(fleet) == {"10.0.0.4:8102"} and len(api.lists) == 1


def test_an_account_that_may_list_and_not_watch_is_said_once_and_the_delays_grow(
    account: Path, caplog: pytest.LogCaptureFixture, delays: list[int]
) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3"))], fails_watches=403)
    with caplog.at_level(logging.INFO), following(api, account) as (fleet, _):
        until(lambda: len(delays) >= 5)
        assert delays[:5] == [1, 2, 3, 4, 5] and said(caplog) == ["fails"] and "answered 403" in caplog.text
        assert names(fleet) == {"10.0.0.3:8102"}


@pytest.mark.parametrize(
    "line",
    [b"not JSON\n", event("MODIFIED", slice_of(pod("not a host/"), version=4)), event("ERROR", {"code": 500})],
    ids=["undecodable", "no instance", "error"],
)
def test_what_a_watch_cannot_use_is_not_asked_for_again(
    account: Path, caplog: pytest.LogCaptureFixture, line: object
) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3"))], version=3)
    with caplog.at_level(logging.INFO), following(api, account) as (fleet, _):
        until(lambda: len(api.watches) == 1)
        api.listed, api.version = [slice_of(pod("10.0.0.8"), version=90)], 90
        api.put(line)
        until(lambda: len(api.watches) == 2)
        assert api.watches[1]["resourceVersion"] == "90" and names(fleet) == {"10.0.0.8:8102"}
        until(lambda: said(caplog) == ["fails", "answers"])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda api: setattr(api, "more", "next"), "more than 500"),
        (lambda api: api.listed.append({"metadata": {"name": 7}}), "Expected `str`"),
        (lambda api: api.listed.append(slice_of(pod("not a host/"))), "not a host"),
    ],
)
def test_what_cannot_be_used_changes_nothing(
    account: Path, caplog: pytest.LogCaptureFixture, spoil: Any, says: str
) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3"))])
    spoil(api)
    with following(api, account) as (fleet, changes):
        until(lambda: len(api.lists) >= 2)
        assert not names(fleet) and not changes and says in caplog.text


def test_a_list_that_drips_has_a_deadline_for_the_whole(
    account: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_ANSWER_S", 1.0)
    api = RecordedApi([slice_of(pod("10.0.0.3"))], drips=True)
    with following(api, account) as (fleet, _):
        until(lambda: "its answer was not whole after 1 s" in caplog.text)
        api.drips = False
        until(lambda: names(fleet) == {"10.0.0.3:8102"})


def test_a_line_without_an_end_is_not_kept(
    account: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_LINE_BYTES", 1000)
    api = RecordedApi([slice_of(pod("10.0.0.3"))])
    with following(api, account) as (fleet, _):
        api.put(b"x" * 2000)
        until(lambda: "has more than 1000 bytes" in caplog.text)
        assert names(fleet) == {"10.0.0.3:8102"}


def test_instances_of_another_source_are_left_alone_and_a_contradiction_changes_nothing(
    account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api = RecordedApi([slice_of(pod("10.0.0.3"), pod("10.0.0.4"))])
    fleet = Fleet(CircuitPolicy())
    fleet.add(parse_spec(Role.PREFILL, "10.0.0.3:8102"), "flag")
    source = KubernetesService(Role.DECODE, "pd-decode", fleet, api.served.url, str(account))
    loop = LoopThread("metaserver")
    watching = loop.submit(source.watch())
    try:
        until(lambda: "is a prefill instance by flag" in caplog.text)
        assert [(i.name, i.role) for i in fleet] == [("10.0.0.3:8102", Role.PREFILL)]
    finally:
        watching.cancel()
        loop.stop()
        api.served.stop()


def test_the_apis_certificate_is_verified_without_what_many_clusters_cas_lack(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 sets this flag by default, and refuses a CA without an Authority Key Identifier."""
    made = ssl.create_default_context

    def as_in_313(**named: Any) -> ssl.SSLContext:
        context = made(**named)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_in_313)
    certificate(account, "ca", "127.0.0.1")[0].rename(account / "ca.crt")
    source = KubernetesService(Role.DECODE, "pd-decode", Fleet(CircuitPolicy()), "https://127.0.0.1:1", str(account))
    context = source._upstream.session._tls.context()
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname


def test_a_service_is_named_and_the_api_is_known_or_the_start_ends() -> None:
    fleet = Fleet(CircuitPolicy())
    for text in ("", "a/b/c", "UPPER", "name:", "x y"):
        with pytest.raises(ConfigError, match="PD-CONF-003"):
            KubernetesService(Role.PREFILL, text, fleet, "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        KubernetesService(Role.PREFILL, "pd-prefill", fleet)
    assert (
        api_from({"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}) == "https://10.96.0.1:443"
    )
    assert api_from({"KUBERNETES_SERVICE_HOST": "fd00::1"}) == "https://[fd00::1]:443"


def test_the_metaserver_serves_over_the_pods_of_its_services(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KubernetesService.__init__, "__defaults__", ("", str(account)))
    api = RecordedApi()
    try:
        with cluster(decode=2, decode_service="pd-decode", kubernetes_api=api.served.url) as c:
            c.http.delete(f"/instances/{c.decode[1].address}")
            host, port = c.decode[1].address.split(":")
            api.put(event("ADDED", slice_of(pod(host), port=int(port))))
            until(lambda: (i := c.worker.fleet.get(c.decode[1].address)) is not None and i.answered)
            assert c.complete("x").status_code == 200
            api.put(END)
    finally:
        api.put(END)
        api.served.stop()
