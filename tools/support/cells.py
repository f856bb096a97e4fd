# SPDX-License-Identifier: Apache-2.0
"""Cells of the fault matrices: a stage of a request, a role, a fault; and how a cell is run.

Behind our metaserver a role is killed, stopped or refuses; behind other routers, in their orders, each role is killed
at each stage.

In a cell three requests go through a pair. When the first one reaches the stage, the process that is there stops
itself; the fault is applied to the victim; the stopped process continues. Then all promises are checked (`CellRun`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tools.support import faults, routers, sdist
from tools.support.checks import (
    counter,
    fresh_prompt,
    fresh_salt,
    loaded_tokens,
    reference_answers,
    wait_for_free_blocks,
)
from tools.support.checks import settled_free_blocks as free_now
from tools.support.client import RequestFailed, TimedAnswer, body_of, stream
from tools.support.cluster import STRICT, Cluster, Metaserver
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess
from tools.support.faults import DOOR, MODULE, PLUGIN, Orders
from tools.support.models import ensure
from tools.support.spec import EngineSpec, MetaserverSpec
from vllm_ascend_pd.viewer.timeline import Trace

KILL, STOP, REFUSE = "SIGKILL", "SIGSTOP", "refusal"
ROLES = {"P": "prefill", "D": "decode", "M": "metaserver"}
STAGES = {
    1: "client → metaserver",
    2: "metaserver → D",
    3: "D → metaserver: reservation",
    4: "metaserver → P",
    5: "BEGIN ↔ READY",
    6: "layers are written",
    7: "DONE",
    8: "D worker → D scheduler",
    9: "P worker → P scheduler",
}
# The process that stops at each stage, and the event at which it does.
WHERE = {
    1: ("M", "meta.decode"),
    2: ("D", "arrived"),
    3: ("D", "reserved"),
    4: ("M", "meta.prefill"),
    5: ("P", "begin"),
    6: ("P", "layer_submitted"),
    7: ("P", "push_closed"),
    8: ("D", "closed"),
    9: ("P", "released"),
}


@dataclass(frozen=True, eq=False)
class Order:
    """Order in which a router asks P and D. The router is `M` among the roles."""

    name: str
    mark: str  # prefix of its cells' names
    stages: Mapping[int, str]
    where: Mapping[int, tuple[str, str]]
    router: Callable[..., routers.Router] | None = None  # None: our metaserver


D_FIRST = Order("D first", "", STAGES, WHERE)
P_FIRST = Order(
    "P first",
    "p",
    {**STAGES, 1: "router → P", 2: "P holds", 3: "router → D: reservation", 4: "D's offer → P"},
    {**WHERE, 1: ("P", "collecting"), 2: ("P", "held"), 3: ("D", "reserved"), 4: ("P", "bound")},
    routers.toy,
)
AT_ONCE = Order(
    "both at once",
    "c",
    {**{stage: P_FIRST.stages[stage] for stage in (1, 3, 4)}, **{stage: STAGES[stage] for stage in range(5, 10)}},
    P_FIRST.where,
    routers.push_demo,
)
ORDERS = (D_FIRST, P_FIRST, AT_ONCE)

# Short, so that a cell takes seconds. With them D frees blocks at most X + H + T = 25 s after the reservation.
TIMERS = {
    "lease_s": 2.0,
    "margin_s": 0.5,
    "transfer_timeout_s": 5.0,
    "quiet_extra_s": 2.0,
    "ready_timeout_s": 3.0,
    "stall_timeout_s": 4.0,
    "recv_deadline_s": 8.0,
    "hold_s": 8.0,
    "meet_s": 3.0,
}
GRACE = ("--shutdown-timeout", "10")  # the default, 0, kills vLLM's engine core at once
FAILED = "vllm:ascend_pd_num_failed_recvs_total"
STOPPED_S = TIMERS["recv_deadline_s"] + 1.0
LIMIT_S = 30.0  # all must be over so long after the fault (or the SIGCONT of a role that has to answer)
REACH_S = 10.0
LENGTHS = (300, 90, 210)
TOKENS = 12


@dataclass(frozen=True)
class FaultCell:
    stage: int
    role: str
    fault: str
    refusal: str = ""
    stops: bool = True  # whether a process is stopped at the stage first; some refusals need no such stop
    order: Order = D_FIRST

    @property
    def name(self) -> str:
        return f"{self.order.mark}{self.stage}{self.role}"

    @property
    def title(self) -> str:
        return self.order.stages[self.stage]

    @property
    def victim(self) -> str:
        return "router" if self.role == "M" and self.order.router is not None else ROLES[self.role]

    def __str__(self) -> str:
        return f"{self.name} ({self.title}; {self.victim}: {self.fault})"

    @property
    def starts_an_engine(self) -> bool:
        return self.fault == KILL and self.role != "M"


CELLS = (
    FaultCell(1, "P", STOP),
    FaultCell(1, "D", KILL),
    FaultCell(1, "M", REFUSE, "clients", stops=False),
    FaultCell(2, "P", KILL),
    FaultCell(2, "D", REFUSE, "503", stops=False),
    FaultCell(2, "M", STOP),
    FaultCell(3, "P", STOP),
    FaultCell(3, "D", KILL),
    FaultCell(3, "M", REFUSE, "reservations", stops=False),
    FaultCell(4, "P", REFUSE, "503", stops=False),
    FaultCell(4, "D", STOP),
    FaultCell(4, "M", KILL),
    FaultCell(5, "P", STOP),
    FaultCell(5, "D", REFUSE, "begin", stops=False),
    FaultCell(5, "M", KILL),
    FaultCell(6, "P", KILL),
    FaultCell(6, "D", REFUSE, "writes"),
    FaultCell(6, "M", STOP),
    FaultCell(7, "P", REFUSE, "done", stops=False),
    FaultCell(7, "D", KILL),
    FaultCell(7, "M", STOP),
    FaultCell(8, "P", KILL),
    FaultCell(8, "D", STOP),
    FaultCell(8, "M", REFUSE, "prefilled"),
    FaultCell(9, "P", REFUSE, "500 after all", stops=False),
    FaultCell(9, "D", STOP),
    FaultCell(9, "M", KILL),
)
ROUTED = tuple(
    FaultCell(stage, role, KILL, order=order)
    for order in (P_FIRST, AT_ONCE)
    for stage in order.stages
    for role in "PDM"
)


@dataclass
class CellResult:
    """Result of a cell."""

    cell: FaultCell
    answers: str = ""
    slowest_s: float = 0.0  # last of the three answers, after the fault (SIGSTOP of D or M: after SIGCONT)
    clean_s: float = 0.0  # until the survivors' blocks are free, after the fault
    served_s: float = 0.0  # a new request over the same pair, after the victim is back
    total_s: float = 0.0


class PromiseBroken(AssertionError):
    """A promise was broken."""


@dataclass
class FaultSite:
    """A pair with the fault plug-in, behind a metaserver with it or behind another, unchanged router."""

    cluster: Cluster
    servers: dict[str, Any]
    orders: dict[str, Orders]
    tally: AnswerTally
    make_front: Callable[[EngineProcess, EngineProcess], Metaserver | routers.Router]

    @property
    def prefill(self) -> EngineProcess:
        engine: EngineProcess = self.servers["P"]
        return engine

    @property
    def decode(self) -> EngineProcess:
        engine: EngineProcess = self.servers["D"]
        return engine

    @property
    def front(self) -> Metaserver | routers.Router:
        server: Metaserver | routers.Router = self.servers["M"]
        return server

    def replace(self, role: str) -> None:
        """Start the killed server again: same command, same address."""
        old = self.servers[role]
        if role == "M":
            self.close_front()
            self.servers[role] = self.make_front(self.prefill, self.decode)
        else:
            self.cluster.stop(old)
            (self.servers[role],) = self.cluster.start(old.spec)

    def close_front(self) -> None:
        if isinstance(self.front, routers.Router):
            self.front.stop()
        else:
            self.cluster.stop(self.front)

    def compare(self, name: str, prompt: list[int], want: TimedAnswer, got: TimedAnswer) -> None:
        """Compare one answer with P's, where P is alive to say how near two tokens are."""
        if not self.prefill.process.alive:  # no logits to look up: only equality counts
            if want.tokens != got.tokens:
                raise PromiseBroken(f"{name}: expected {want.tokens}, got {got.tokens}")
            return
        gap = {"cache_salt": fresh_salt("gap")}
        self.tally.check(name, prompt, want.tokens, got.tokens, self.prefill.url, body=gap)

    def serve(self, name: str, until: float) -> None:
        """Send a new request that must get its KV from P.

        While the metaserver's circuit is open, repeat it after each 503.
        """
        p = fresh_prompt(150)
        (want,) = reference_answers(self.prefill, [p], TOKENS)
        while True:
            before, failed = loaded_tokens(self.decode), counter(self.decode, FAILED)
            clients = Clients(self.front.url, [body_of(p, TOKENS)])
            if not clients.wait(until):
                raise PromiseBroken(f"{name}: afterwards a request was not answered")
            (got,) = clients.results
            if isinstance(got, TimedAnswer):
                break
            if not (isinstance(got, RequestFailed) and got.status == 503) or time.monotonic() > until:
                raise PromiseBroken(f"{name}: afterwards a request failed: {got!r}")
            time.sleep(0.25)
        self.compare(name, p, want, got)
        free_now(self.decode)  # one more step updates the counters
        if counter(self.decode, FAILED) != failed:  # the counter of loads counts their beginnings
            raise PromiseBroken(f"{name}: afterwards a transfer failed and D computed the prompt itself")
        loaded = loaded_tokens(self.decode) - before
        if loaded != len(p):
            raise PromiseBroken(f"{name}: afterwards D computed a prompt itself (loaded {loaded} of {len(p)} tokens)")


STORES = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}


def start_pair(
    cluster: Cluster,
    name: str,
    p_tp: int,
    metaservers: Sequence[str],
    verify: str = "full",  # of D
    timers: dict[str, float] = TIMERS,
    regroup: str = "auto",  # of P; on CPU "auto" exchanges nothing
    listener: int = 0,  # port of P's scheduler for other routers than ours; 0: none
) -> tuple[EngineProcess, EngineProcess, dict[str, Orders]]:
    """Start P and D with the fault plug-in, on addresses that a restart keeps."""
    orders = {role: Orders(cluster.directory / "orders" / f"{name}-{role}") for role in ROLES}
    config = {**cluster.push_config(), **timers}
    common: dict[str, Any] = {"plugins": (PLUGIN,), "arguments": (*DOOR, *GRACE), "chunk": 128}
    d_more = {"metaserver_urls": list(metaservers), "side_channel_port": cluster.port(), "verify": verify}
    p_more: dict[str, Any] = {"regroup": regroup}
    if listener:
        p_more |= {"hold_sources": 16, "hold_share": 0.5, "side_channel_port": listener}
        d_more["prefill_listeners"] = [f"127.0.0.1:{listener}"]
    p, d = (
        EngineSpec(
            f"{name}-{role.lower()}",
            ensure("gqa"),
            role=kind,
            tp=tp,
            extra={**config, **more},
            environment={**orders[role].environment, **STORES},
            **common,
        )
        for role, kind, tp, more in (
            ("P", "kv_producer", p_tp, p_more),
            ("D", "kv_consumer", 1, d_more),
        )
    )
    prefill, decode = cluster.start(p, d)
    return prefill, decode, orders


def make_site(
    cluster: Cluster,
    prefill: EngineProcess,
    decode: EngineProcess,
    orders: dict[str, Orders],
    port: int,
    tally: AnswerTally,
    options: tuple[str, ...] = STRICT,
) -> FaultSite:
    spec = MetaserverSpec(options, MODULE, (PLUGIN,), orders["M"].environment)

    def front(p: EngineProcess, d: EngineProcess) -> Metaserver:
        return cluster.metaserver([p], [d], port, spec)

    return FaultSite(cluster, {"P": prefill, "D": decode, "M": front(prefill, decode)}, orders, tally, front)


def start_routed(
    cluster: Cluster, name: str, p_tp: int, order: Order, tally: AnswerTally, regroup: str = "auto"
) -> FaultSite:
    """Start a pair behind the router of that order. Raise sdist.Unreachable if its source is not available."""
    assert order.router is not None
    sdist.ensure(routers.VLLM)
    listener, port = cluster.port(), cluster.port()
    prefill, decode, orders = start_pair(cluster, name, p_tp, [], regroup=regroup, listener=listener)
    where = [listener] if order is AT_ONCE else []

    def front(p: EngineProcess, d: EngineProcess) -> routers.Router:
        return order.router(p, d, *where, port, cluster.logs)  # type: ignore[misc]

    return FaultSite(cluster, {"P": prefill, "D": decode, "M": front(prefill, decode)}, orders, tally, front)


class Clients:
    """Requests in progress, each on a connection of its own."""

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]]) -> None:
        self.results: list[TimedAnswer | BaseException | None] = [None] * len(bodies)
        self.ended: list[float] = [0.0] * len(bodies)
        self._url, self._bodies = url, bodies
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), name="clients")
        self._thread.start()

    def wait(self, until: float) -> bool:
        """Wait, and return whether all have ended."""
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    async def _all(self) -> None:
        limits = httpx.Limits(max_connections=len(self._bodies))
        timeout = httpx.Timeout(connect=5.0, read=4 * LIMIT_S, write=30.0, pool=30.0)
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, verify=False) as client:
            await asyncio.gather(*(self._one(client, index) for index in range(len(self._bodies))))

    async def _one(self, client: httpx.AsyncClient, index: int) -> None:
        try:
            self.results[index] = await stream(client, self._url + "/v1/completions", self._bodies[index])
        except (RequestFailed, httpx.HTTPError) as problem:
            self.results[index] = problem
        self.ended[index] = time.monotonic()


@dataclass
class CellRun:
    """One cell on one site."""

    site: FaultSite
    cell: FaultCell
    row: CellResult = field(init=False)
    prompts: list[list[int]] = field(init=False)
    expected: list[TimedAnswer] = field(init=False)
    _fault_at: float = 0.0
    _clients: Clients | None = None

    def __post_init__(self) -> None:
        self.row = CellResult(self.cell)

    def __call__(self) -> CellResult:
        begun = time.monotonic()
        for orders in self.site.orders.values():
            orders.clear()
        self.prompts = [fresh_prompt(n) for n in LENGTHS]
        self.expected = reference_answers(self.site.prefill, self.prompts, TOKENS)
        engines = {"P": self.site.prefill, "D": self.site.decode}
        free = {engine.name: free_now(engine) for engine in engines.values()}
        others = {role: server for role, server in self.site.servers.items() if role != self.cell.role}
        before = {role: _pids(server) for role, server in others.items()}
        try:
            self._strike()
            self._survive([engines[role] for role in others if role in engines], free)
        finally:
            for server in self.site.servers.values():
                server.process.resume()  # after any outcome, no process stays stopped
            for orders in self.site.orders.values():
                orders.comply()
            if self._clients is not None and not self._clients.wait(time.monotonic() + LIMIT_S):
                raise PromiseBroken(f"{self.cell}: a client waits without end")
        self._judge()
        self._check_recovery(free)
        for role, server in others.items():
            gone = before[role] - _pids(server)
            if gone:
                raise PromiseBroken(f"{self.cell}: {ROLES[role]} lost processes {sorted(gone)}")
        self.row.total_s = time.monotonic() - begun
        return self.row

    # -- the fault

    def _strike(self) -> None:
        cell, site = self.cell, self.site
        where, event = cell.order.where[cell.stage]
        if cell.stops:
            site.orders[where].stop_at(event)
        # The order must be there from the start: P's answer may arrive before D has loaded.
        if not cell.stops or cell.refusal == "prefilled":
            site.orders[cell.role].refuse(cell.refusal)
        self._clients = Clients(site.front.url, [body_of(p, TOKENS) for p in self.prompts])
        pid = site.orders[where].stopped(REACH_S) if cell.stops else 0
        victim = site.servers[cell.role]
        self._fault_at = time.monotonic()
        if cell.fault == KILL:
            stuck = victim.process.kill()
            if stuck:
                raise PromiseBroken(str(stuck))
        elif cell.fault == STOP:
            victim.process.pause()
        elif cell.stops and cell.refusal == "prefilled":
            site.orders[cell.role].wait_refused(REACH_S)
            time.sleep(0.2)  # until D's scheduler has received it
        elif cell.stops:
            site.orders[cell.role].refuse(cell.refusal)
            if cell.refusal == "writes":
                site.orders[cell.role].wait_refused(REACH_S)
                time.sleep(0.2)  # until D's loop thread has revoked
        if pid and (where != cell.role or cell.fault == REFUSE):
            faults.wake_pid(pid)

    # -- while the fault lasts

    def _survive(self, engines: list[EngineProcess], free: dict[str, int]) -> None:
        cell, clients = self.cell, self._clients
        assert clients is not None
        until = self._fault_at + LIMIT_S
        if cell.fault == STOP:
            time.sleep(max(0.0, self._fault_at + STOPPED_S - time.monotonic()))
            if cell.role == "P":  # D must not wait for a stopped P
                self._all_answered(clients, until)
            self._clean(engines, free, until)
            self.site.servers[cell.role].process.resume()
            if cell.role != "P":  # it is on the path of the answer
                self._fault_at = time.monotonic()
                until = self._fault_at + LIMIT_S
        self._all_answered(clients, until)
        if cell.fault == REFUSE:
            self.site.orders[cell.role].comply()
            if not self.site.orders[cell.role].refused:
                raise PromiseBroken(f"{cell}: nothing was refused")
        if cell.fault != STOP:
            self._clean(engines, free, until)

    def _all_answered(self, clients: Clients, until: float) -> None:
        if not clients.wait(until):
            raise PromiseBroken(f"{self.cell}: no answer within {LIMIT_S:.0f} s")
        self.row.slowest_s = max(clients.ended) - self._fault_at

    def _clean(self, engines: list[EngineProcess], free: dict[str, int], until: float) -> None:
        try:
            wait_for_free_blocks(engines, free, max(1.0, until - time.monotonic()))
        except AssertionError as late:
            raise PromiseBroken(f"{self.cell}: survivors' {late}") from None
        self.row.clean_s = time.monotonic() - self._fault_at

    # -- afterwards

    def _judge(self) -> None:
        """Require right tokens or a clear error."""
        assert self._clients is not None
        seen: Counter[str] = Counter()
        for p, want, got in zip(self.prompts, self.expected, self._clients.results, strict=True):
            if isinstance(got, TimedAnswer):
                self.site.compare(str(self.cell), p, want, got)
                seen["right"] += 1
            else:
                seen[self._clear(got)] += 1
        self.row.answers = ", ".join(f"{count} {what}" for what, count in seen.items())

    def _clear(self, problem: BaseException | None) -> str:
        if isinstance(problem, RequestFailed) and problem.status >= 400:
            return f"HTTP {problem.status}"
        closes = self.cell.role == "M" or self.cell.order.router is not None
        if isinstance(problem, httpx.NetworkError | httpx.RemoteProtocolError) and closes:
            # A killed process's kernel closes its connections. Other routers close an answer that has begun when D is
            # killed; vLLM's push demo also when P is killed, whose response it awaits after D's last chunk.
            return "connection closed"
        raise PromiseBroken(f"{self.cell}: no clear error: {problem!r}")

    def _check_recovery(self, free: dict[str, int]) -> None:
        """Check that with the victim back the pair serves new requests at once, and that nothing has leaked."""
        if self.cell.fault == KILL:
            self.site.replace(self.cell.role)
            if self.cell.role != "M":
                free[self.site.servers[self.cell.role].name] = free_now(self.site.servers[self.cell.role])
        begun = time.monotonic()
        self.site.serve(str(self.cell), begun + LIMIT_S)
        self.row.served_s = time.monotonic() - begun
        try:
            wait_for_free_blocks([self.site.prefill, self.site.decode], free, LIMIT_S)
        except AssertionError as leaked:
            raise PromiseBroken(f"{self.cell}: afterwards {leaked}") from None


def _pids(server: Any) -> set[int]:
    return {process.pid for process in server.process.members()}


def exchanges(traces: Path) -> int:
    """Return the number of exchanges among prefill's ranks; a killed process may have written only some of its own."""
    events = Trace(traces).events
    return sum(event.stage == "exchanged" and bool(event.facts["ok"]) for event in events)


def table(rows: Sequence[CellResult]) -> list[str]:
    """Return the rows as a Markdown table."""
    lines = [
        "| cell | stage | victim | fault | answers | last answer | survivors clean | served again | cell took |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cell = row.cell
        times = " | ".join(f"{t:.1f} s" for t in (row.slowest_s, row.clean_s, row.served_s, row.total_s))
        head = f"{cell.name} | {cell.title} | {cell.victim} | {cell.fault}"
        lines.append(f"| {head} | {row.answers} | {times} |")
    return lines
