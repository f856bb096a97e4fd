# SPDX-License-Identifier: Apache-2.0
"""Both runtimes with the real Mooncake, one side in a process that is stopped or killed: the effects on the others."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("mooncake") is None:  # not imported here: its environment must be set first
    pytest.skip("Mooncake is not installed", allow_module_level=True)

from tools.support.fork_server import ForkServers
from unit.kits.beside import Beside, Delays
from unit.kits.refusing import no_more_threads
from unit.kits.watching import Events, running, traced, until
from unit.runtime.site_child import LEASE_S, MODULE, SiteChild, decode_site, packed, prefill_site, unpacked
from unit.runtime.sites import DecodeSite, PrefillSite, SitePrompt
from vllm_ascend_pd.transport.engine import OpenEngine

TOKENS = 600
WATCHED_S = LEASE_S + 7.5  # longer than lease, transfer timeout and the transport's timeout together
# What a faulty peer may cost others of its lease, by the clock of a pair beside them. First contact costs a sixth of
# it, once; who waits for the peer waits for all of it.
OF_A_TRANSFER, OF_A_STEP = 1 / 5, 1 / 10


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServers]:
    """Return what forks the children, which imports once for all of them."""
    with ForkServers((MODULE,), tmp_path_factory.mktemp("forks")) as forks:
        yield forks


@pytest.fixture
def decode_child(forks: ForkServers) -> Iterator[SiteChild]:
    with SiteChild("decode", forks) as child:
        yield child


def warm(p: PrefillSite, d: DecodeSite, child: SiteChild) -> None:
    """Send one request to each, so that all have connected; the child's is request number 0, the next will be number
    1."""
    first = d.bound("warm", 40)
    p.prefill(first)
    assert d.received(first)[0].ok
    other = unpacked("warm-child", 40, 0, child.ask("reserve", "warm-child", 40))
    child.ask("step")
    p.prefill(other)
    until(lambda: "warm-child=True" in child.ask("step"), "the child's first request")
    p.finish_and_free(first, other)


@pytest.mark.parametrize(
    ("fault", "met"),
    [
        pytest.param("stopped in a write", True, marks=pytest.mark.ci),
        ("killed in a write", True),
        pytest.param("stopped before first contact", False, marks=pytest.mark.ci),
        ("stopped between its answer and first contact", False),  # the case that a probe cannot prevent
    ],
)
def test_a_dead_or_stalled_decode_engine_delays_neither_the_forward_nor_another(
    fault: str, met: bool, decode_child: SiteChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small requests go to a healthy D one after another, while a large one is in progress to the faulty one."""
    p, d, others = prefill_site(), decode_site(), (prefill_site(), decode_site())
    with running(p, d, *others), Beside(Transfers(*others)) as beside, traced() as events:
        steps, transfers = Delays(beside, "steps of P"), Delays(beside, "transfers to the healthy D")
        transfer = Transfers(p, d, steps)
        if met:
            warm(p, d, decode_child)
        else:
            first = d.bound("warm", 40)
            p.prefill(first)
            assert d.received(first)[0].ok
        text = decode_child.ask("reserve", "bad", TOKENS)
        if fault.endswith("its answer and first contact"):
            said, answers = iter([True]), OpenEngine.answers
            # A later probe meets the stopped process.
            monkeypatch.setattr(OpenEngine, "answers", lambda *peer: next(said, False) or answers(*peer))
        if not met:  # READY is on its way: P will write to a stopped process
            decode_child.ask("halt-at", "ready")
        decode_child.ask("step")
        bad = unpacked("bad", TOKENS, int(met), text)
        assert p.admit(bad) is None
        with steps.one():
            p.compute((bad, TOKENS // 2))
        until(lambda: _submitted(events, bad), "a write to the bad one")
        if fault == "killed in a write":
            decode_child.kill()
        else:
            decode_child.stop()
        with steps.one():
            p.compute((bad, TOKENS // 2))
        p.finish(bad)
        begun, before = time.monotonic(), beside.pieces
        while time.monotonic() - begun < WATCHED_S:
            with transfers.one():
                transfer()
        a_lease = (beside.pieces - before) * LEASE_S / WATCHED_S
        print(f"{fault}: {a_lease:.0f} pieces are a lease\n{transfers}\n{steps}")
        assert transfers.share(a_lease, LEASE_S) < OF_A_TRANSFER
        assert steps.share(a_lease, LEASE_S) < OF_A_STEP  # P's forward waits for no peer
        p.released_blocks_of(bad)  # at P's own deadlines, whatever D does
        failed = [facts for stage, facts in events if stage == "push_closed" and not facts["ok"]]
        assert len(failed) == 1 and failed[0]["transfer"] == str(bad.reservation.transfer)


class Transfers:
    """A small request from this P to this D, again and again."""

    def __init__(self, p: PrefillSite, d: DecodeSite, steps: Delays | None = None) -> None:
        self._p, self._d, self._steps, self._count = p, d, steps, 0

    def __call__(self) -> None:
        self._count += 1
        request = self._d.bound(f"again-{self._count}", 40)
        with self._steps.one() if self._steps else contextlib.nullcontext():
            self._p.prefill(request)
        assert self._d.received(request)[0].ok
        self._p.finish_and_free(request)
        self._p.pool.give(request.p_blocks)
        self._d.release(request)


def _submitted(events: Events, request: SitePrompt) -> bool:
    transfer = str(request.reservation.transfer)
    return any(stage == "layer_submitted" and transfer in facts["transfers"] for stage, facts in list(events))


def test_a_prefill_engine_stopped_in_a_write_is_shut_out_and_others_are_tried_again(forks: ForkServers) -> None:
    """Revocation with the real transfer engine: D fences, revokes, frees and goes on; the stopped process writes
    nothing later."""
    d, other = decode_site(), prefill_site()
    with SiteChild("prefill", forks) as sleeper, running(d, other), traced() as events:
        first = d.reserve("warm", 40)  # P has connected to D: its next write is issued at once
        d.step()
        sleeper.say("prefill", first.name, 40, 0, packed(first.reservation))
        assert d.received(first)[0].ok
        assert sleeper.line() == "ok"
        bad = d.bound("bad", TOKENS)
        sleeper.ask("halt-in-write", 3)
        sleeper.say("prefill", bad.name, TOKENS, len(d.requests) - 1, packed(bad.reservation))
        sleeper.halted()
        d.book.request_finished(bad.name)  # the client disconnects: D fences
        slow = d.reserve("slow", 320)  # in progress from another P when access is revoked
        d.step()
        assert other.admit(slow) is None
        other.compute((slow, 160))
        until(lambda: _revoked(events), "the revocation", 30.0)
        d.received(bad)
        assert not d.done[bad.name][0].ok
        other.compute((slow, 160))
        (report,) = d.received(slow)
        # Cut by the revocation, or by its lease if the machine stood still for as long.
        assert not report.ok and report.why.code in ("PD-XFER-004", "PD-XFER-001"), "what is cut fails cleanly"
        other.finish_and_free(slow)
        other.pool.give(slow.p_blocks)
        d.release(slow)
        d.release(bad)  # the blocks have another owner from here on
        retried = d.bound("again", 320)
        other.prefill(retried)
        assert d.received(retried)[0].ok, "tried again under the new session"
        d.check(retried)
        before = d.copied()
        sleeper.wake()
        assert sleeper.line() == "ok"
        assert sleeper.ask("blocks") == "bad-on-p warm-on-p", "it gives its own blocks back"
        time.sleep(0.5)
        assert d.holds(before), "the sleeper wrote when it woke"
        later = d.bound("later", 100)
        sleeper.say("prefill", later.name, 100, len(d.requests) - 1, packed(later.reservation))
        assert d.received(later)[0].ok, "the sleeper is used again without a restart"
        d.check(later)


@pytest.mark.parametrize("names", ["pd-probe", "pd-watch"])
def test_a_prefill_engine_at_its_limit_of_threads_fails_pushes_and_lives(names: str) -> None:
    d, p = decode_site(), prefill_site()
    with running(d, p):
        refused, later = d.reserve("refused", 40), d.reserve("later", 40)
        d.step()
        with no_more_threads(names) as asked:
            p.prefill(refused)
            assert d.received(refused)[0].why.code == "PD-XFER-003"
        assert asked
        p.prefill(later)
        assert d.received(later)[0].ok, "the writer lives"
        d.check(later)


def _revoked(events: Events) -> bool:
    return any(stage == "quiet" and facts["proof"] == "revoked" for stage, facts in list(events))


def test_a_decode_engine_killed_and_started_again_is_used_without_a_restart_of_prefill(forks: ForkServers) -> None:
    p = prefill_site()
    with running(p):
        for _ in range(2):
            with SiteChild("decode", forks) as child:
                name = f"r-{child.process.pid}"
                request = unpacked(name, 200, 0, child.ask("reserve", name, 200))
                child.ask("step")
                p.prefill(request)
                until(lambda child=child, name=name: f"{name}=True" in child.ask("step"), "the child's request")
                assert child.ask("check", name) == "ok"
                p.finish_and_free(request)
    assert threading.active_count() < 50
