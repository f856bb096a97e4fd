# SPDX-License-Identifier: Apache-2.0
"""The status page: its contents, access to it, and a real browser that shows an instance going down and coming back."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation.front.speech import understood

from tools.support import browser
from unit.router.cluster import cluster, until
from vllm_ascend_pd.router import page
from vllm_ascend_pd.router.faults import brief, remedy

TOKEN = "a-token-of-enough-length"
TRACES = Path(__file__).parents[1] / "traces" / "tp2_to_tp1"
needs_browser = pytest.mark.skipif(not browser.executable(), reason=browser.MISSING)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Tab]:
    with browser.browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


def test_the_page_is_one_file_that_needs_nothing_from_elsewhere() -> None:
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|https?://|@import|url\(""", page.PAGE)
    assert "innerHTML" not in page.PAGE and "document.write" not in page.PAGE  # request ids come from clients
    with cluster() as c:
        answer = c.http.get("/")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy


def test_without_a_token_the_page_is_for_this_host_under_its_own_name() -> None:
    with cluster() as c:
        assert c.http.get("/", headers={"host": "rebound.example"}).status_code == 403


def test_with_a_token_the_page_tells_nothing_without_it() -> None:
    with cluster(admin_token=TOKEN) as c:
        assert c.prefill[0].address not in c.http.get("/").text
        for path in ("/status", "/timeline?transfer=x"):
            assert c.http.get(path).status_code == 401
            assert c.http.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_errors_are_kept_with_code_and_remedy_and_without_an_engines_words() -> None:
    with cluster(decode=2) as c:
        for engine in c.decode:
            engine.behaviour.status = 500
        c.prefill[0].behaviour.status = 400
        answer = c.complete("a secret prompt")
        assert answer.status_code == 500 and "as set" in answer.text  # the engine's error is passed on
        for engine in c.decode:
            engine.behaviour.status = 200
        assert c.complete("a secret prompt").status_code == 200  # D computed it by itself
        status = c.http.get("/status").json()
        errors = {error["code"]: error for error in status["errors"]}
        assert errors["PD-META-007"]["what"] == "answered 500 (Fake)"
        assert "decode engine's log" in errors["PD-META-007"]["remedy"]
        assert errors["PD-META-006"]["what"] == f"{c.prefill[0].address} answered 400 (Fake)"
        assert errors["PD-META-006"]["request"] == status["last"][-1]["id"]
        assert "as set" not in json.dumps(status) and "secret" not in json.dumps(status)


def test_an_engines_refusal_is_reported_by_its_kind_alone() -> None:
    assert brief(400, b'{"error": {"message": "your prompt was: secret", "type": "BadRequestError"}}').endswith(
        "400 (BadRequestError)"
    )
    for body in (b"", b"secret", b'{"error": {"type": "the secret words"}}', b'{"error": "x"}', b"\xff", b"[1]"):
        assert brief(502, body) == "answered 502"


def test_a_remedy_that_needs_values_leads_to_the_catalogue() -> None:
    assert remedy("PD-CONF-003") == remedy("no code") == "See docs/errors.md."


def test_the_timeline_tells_the_way_of_each_layer_or_why_it_cannot(tmp_path: Path) -> None:
    assert "--trace-dir" in page.timeline("", "x")["why"]
    assert str(tmp_path) in page.timeline(str(tmp_path), "x")["why"]
    reserved = (TRACES / "decode-scheduler-25261.jsonl").read_text().splitlines()
    transfer = next(e["transfer"] for e in map(json.loads, reserved) if e["stage"] == "reserved")
    shown = page.timeline(str(TRACES), transfer)["picture"]
    assert "layer  0 |" in shown and "D scheduler reserved" in shown
    with cluster(trace_dir=str(TRACES)) as c:
        assert c.http.get("/timeline", params={"transfer": transfer}).json() == {"picture": shown}


@needs_browser
def test_the_browser_leaves_no_process_behind(tmp_path: Path) -> None:
    with browser.browser(tmp_path) as tab:
        assert len(browser.members(tab.group)) > 2
    assert browser.members(tab.group) == []


@needs_browser
def test_a_browser_shows_an_instance_going_down_and_coming_back(tab: browser.Tab) -> None:
    with cluster(prefill=2) as c:
        gone = c.prefill[1]
        tab.open(str(c.http.base_url))
        tab.until(browser.shows(gone.address, "ready"))
        gone.served.kill()
        tab.until(browser.shows(gone.address, "down"))
        tab.until("document.querySelector('#errors').innerText.includes('PD-META-011')")
        gone.served.start()
        tab.until(browser.shows(gone.address, "ready"))
        c.complete()
        tab.until(browser.shows(c.decode[0].address, c.decode[0].fingerprint, column=4))
        assert tab.text("#ready") == "ready" and not tab.complaints


@needs_browser
def test_a_browser_shows_requests_under_way_and_the_way_of_those_that_ended(tab: browser.Tab) -> None:
    with cluster() as c:
        tab.open(str(c.http.base_url))
        c.prefill[0].behaviour.hold = True
        headers = {"x-request-id": "<b>mine</b>"}
        body = {"prompt": "a secret prompt", "max_tokens": 2}
        asking = threading.Thread(
            target=lambda: c.http.post("/v1/completions", json=body, headers=headers), name="client"
        )
        asking.start()
        tab.until("document.querySelector('#flight').innerText.includes('P computes and pushes')")
        assert "<b>mine</b>" in tab.text("#flight")  # shown as text
        c.prefill[0].behaviour.hold = False
        asking.join()
        tab.until("document.querySelector('#last tr.row') !== null")
        tab.ask("document.querySelector('#last tr.row').click()")
        tab.until("document.querySelector('#last').innerText.includes('loaded')")
        tab.until("document.querySelector('#last').innerText.includes('--trace-dir')")  # the page says that none is set
        assert "secret" not in tab.text() and not tab.complaints


@needs_browser
def test_a_browser_shows_a_stream_that_another_d_went_on_with(tab: browser.Tab) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 12, "min_tokens": 12, "stream": True, "temperature": 0}
    with cluster(decode=2) as c:
        for decode in c.decode:
            decode.behaviour.speaks = True
        whole = understood(c.http.post("/v1/completions", json=body).content)
        for decode in c.decode:
            decode.behaviour.break_after = 7
        said = understood(c.http.post("/v1/completions", json=body).content)
        assert said == whole and len(whole["text"]) > 0
        tab.open(str(c.http.base_url))
        rows = "[...document.querySelectorAll('#last tr.row')].map(r => r.cells[7].innerText).join('|')"
        tab.until(f"{rows} === '1|'")  # newest first
        tab.ask("document.querySelector('#last tr.row').click()")
        tab.until("document.querySelector('#last pre')?.innerText.includes('resume  after 7 tokens')")
        assert tab.text("#errors").count("PD-META-007") == 1 and not tab.complaints


def an_instance(number: int, role: str, state: str, error: str = "", age_s: float = 0.0) -> dict[str, object]:
    known = {"name": f"10.0.{number}.1:8100", "role": role, "state": state, "models": ["MODEL"], "fingerprint": "a1b2"}
    load = {"requests": 3, "tokens_in_flight": 12_345, "served": 1_000, "broke": 0, "weight": 1, "source": "flag"}
    return {**known, **load, "last_error": error, "last_error_at": NOW - age_s}


NOW = 1_790_000_000.0
STAGES = [("decode", 0.0), ("reserved", 0.02), ("prefill", 0.03), ("loaded", 1.2), ("first byte", 1.3), ("broken", 1.4)]
BROKE = {
    "id": "a-request", "route": "/v1/completions", "status": 200, "tokens": 4096, "started": NOW - 9, "attempts": 1,
    "stages": [{"stage": stage, "at": at, "detail": ""} for stage, at in STAGES],
}  # fmt: skip
MANY = {
    "now": NOW, "version": "9.8.7", "deployment": "blue", "ready": True, "prefills": True, "canary_error": "",
    "file_error": "", "running": 7, "waiting": 1, "workers": [], "in_flight": [],
    "instances": [an_instance(n, "prefill" if n < 4 else "decode", "down" if n in (3, 30) else "ready",
                              "connection refused", 7200.0) for n in range(36)],
    "errors": [{"at": NOW, "code": "PD-META-011", "instance": "10.0.3.1:8100", "what": "gone", "request": "", "remedy": "x"}],
    "last": [BROKE, {**BROKE, "id": "another", "stages": BROKE["stages"][:-1]}],
}  # fmt: skip
NAMES = "[...document.querySelectorAll('#instances tr')].map(r => r.cells[0].innerText)"
# Cells whose words stand in more than one line, and whether the page itself is wider than the window.
BROKEN_ROWS = """[...document.querySelectorAll('td.n, td.one')].filter(cell => {
  const words = document.createRange();
  words.selectNodeContents(cell);
  const tops = [...words.getClientRects()].map(line => line.top);
  return Math.max(...tops) - Math.min(...tops) > 10;
}).map(cell => cell.innerText)"""
TOO_WIDE = "document.documentElement.scrollWidth > window.innerWidth"
PICTURES = Path(__file__).resolve().parents[3] / "out" / "page"


def recorded(tab: browser.Tab, url: str, state: dict[str, object]) -> None:
    """Open the page, and let it show a recorded state in place of what the metaserver answers."""
    tab.open(url)
    tab.ask(f"(() => {{ const real = show; show = () => real({json.dumps(state)}); show(); }})()")


@needs_browser
def test_a_browser_sums_up_many_instances_and_begins_with_those_that_are_down(tab: browser.Tab) -> None:
    with cluster() as c:
        recorded(tab, str(c.http.base_url), MANY)
        assert tab.text("#sum") == "ready: P 3/4, D 31/32" and "9.8.7" in tab.text("#workers")
        assert tab.ask("document.title") == "blue · metaserver"
        shown = tab.ask(NAMES)
        assert shown[:2] == ["10.0.3.1:8100", "10.0.30.1:8100"] and shown[-1] == "24 more, all ready"
        assert tab.text("#instances").count("connection refused") == 2, "an old error of one that is ready is no news"
        tab.ask("document.querySelector('#instances button').click()")
        assert len(tab.ask(NAMES)) == 37 and not tab.complaints


@needs_browser
def test_a_browser_opens_a_request_by_the_keyboard_and_keeps_the_focus(tab: browser.Tab) -> None:
    with cluster() as c:
        recorded(tab, str(c.http.base_url), MANY)
        tab.ask("document.querySelector('#last button').focus()")
        for kind in ("keyDown", "keyUp"):
            tab.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )
        tab.until("document.querySelector('#last pre')?.innerText.includes('first byte')")
        tab.ask("show()")
        assert tab.ask("document.activeElement.dataset.key") == "another"
        assert tab.ask("document.activeElement.getAttribute('aria-expanded')") == "true"
        unnamed = (
            "[...document.querySelectorAll('th:not([scope]), input:not([aria-label]), .bar:not([aria-label])')].length"
        )
        assert tab.ask(unnamed) == 0 and "P computes and pushes: 1.2 s" in tab.ask(
            "document.querySelector('.bar').ariaLabel"
        )


@needs_browser
def test_a_stream_that_broke_is_no_success(tab: browser.Tab) -> None:
    with cluster() as c:
        recorded(tab, str(c.http.base_url), MANY)
        said = "[...document.querySelectorAll('#last tr.row')].map(r => [r.cells[3].innerText, r.cells[3].className])"
        assert tab.ask(said) == [["200", "n "], ["200, broke", "n failed"]]


@needs_browser
def test_a_browser_says_when_no_instance_answers(tab: browser.Tab) -> None:
    silent = {"ready": False, "canary_error": "no canary has been answered yet"}
    with cluster() as c:
        state = {**MANY, **silent, "instances": [an_instance(1, "decode", "starting", "connection refused")]}
        recorded(tab, str(c.http.base_url), state)
        assert tab.text("#notice") == "No instance answers: their last errors say why."
        assert "connection refused" in tab.text("#instances")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pictures_of_the_page_have_whole_rows_and_no_overflow(tab: browser.Tab, width: int, scheme: str) -> None:
    """The pictures stay in out/page."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with cluster() as c:
        recorded(tab, str(c.http.base_url), MANY)
        tab.picture(PICTURES / f"{width}-{scheme}.png", width, 1200, scheme)
        assert tab.ask(BROKEN_ROWS) == [] and tab.ask(TOO_WIDE) is False
        dark = tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 27)"
        assert dark is (scheme == "dark")


@needs_browser
def test_a_browser_asks_for_the_token_and_says_when_the_metaserver_is_gone(tab: browser.Tab) -> None:
    with cluster(admin_token=TOKEN) as c:
        tab.open(str(c.http.base_url))
        tab.until("document.querySelector('#login')?.classList.contains('on')")
        assert c.decode[0].address not in tab.text()
        tab.ask(f"document.querySelector('#token').value = '{TOKEN}'; document.querySelector('#login').requestSubmit()")
        tab.until(browser.shows(c.decode[0].address, "ready"))
        until(lambda: "admin token" not in tab.text("#notice"))
    tab.until("document.querySelector('#notice').innerText.includes('old')")


def test_each_refusal_of_the_metaservers_own_has_a_code() -> None:
    with cluster(prefill=0, without_prefill="refuse") as c:
        assert c.complete().json()["error"]["code"] == "PD-META-008"
        assert c.http.get("/status").json()["errors"][-1]["what"] == "no prefill instance"
        c.http.delete(f"/instances/{c.decode[0].address}")
        assert c.complete().json()["error"]["code"] == c.http.get("/v1/models").json()["error"]["code"] == "PD-META-008"
    with cluster(max_running=1, max_waiting=0) as c:
        c.decode[0].behaviour.hold = True
        asking = threading.Thread(target=c.complete, name="client")
        asking.start()
        until(c.decode[0].generations)
        answer = c.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "PD-META-009")
        assert answer.headers["retry-after"]
        c.decode[0].behaviour.hold = False
        asking.join()
