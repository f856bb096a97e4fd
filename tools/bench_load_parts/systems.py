# SPDX-License-Identifier: Apache-2.0
"""Systems of two engines each: all run at once, each engine on a core of its own, and one is asked at a time.

P's ranks have one core, and so have all D's of a pair that has several.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tools.support import routers
from tools.support.cluster import STRICT, Cluster, Metaserver, say
from tools.support.contenders import CONTENDERS, ContenderSite, PairShape, SiteSettings
from tools.support.engine import EngineProcess
from tools.support.from_tests import older_host_build
from tools.support.in_tree import install_nixl, start_mooncake, start_nixl
from tools.support.models import ensure
from tools.support.process import ProcessDied
from tools.support.spec import EngineSpec, MetaserverSpec

MODEL = "base16"
TOKEN_BYTES = 32 << 10  # of KV
NAMES = {"a": "two engines", "b": "this package", "c": "in-tree Mooncake", "d": "in-tree NIXL"}
ON_ASCEND = dict(zip("bef", CONTENDERS, strict=True))  # systems under vllm-ascend
NAMES |= {letter: contender.connector for letter, contender in ON_ASCEND.items() if contender.router}
ENGINES = 2
STARTED_AT_ONCE = 4  # what a core has loaded before cluster.start gives up
# Of two sessions that share a core the kernel asks the sessions' own niceness, where it has one, before the processes'.
POLITE = 'echo 10 2>/dev/null >/proc/self/autogroup; exec nice -n 10 "$0" "$@"'
CACHED = "vllm:request_prefill_kv_computed_tokens_sum"
LACKED = "vllm:external_prefix_cache_hits_total"
WRITTEN = ("vllm:ascend_pd_bytes_transferred_total", "vllm:nixl_bytes_transferred_sum")


@dataclass(frozen=True)
class LoadedSystem:
    """A system that is asked at one address."""

    url: str
    prefills: Sequence[EngineProcess]  # engines that compute prompts
    decodes: Sequence[EngineProcess] = ()  # those that get them computed
    paused: bool = False  # while others are asked
    front: Metaserver | None = None  # its router, if that is this package's

    @property
    def engines(self) -> tuple[EngineProcess, ...]:
        return (*self.prefills, *self.decodes)

    def counts(self) -> dict[str, float]:
        """Return what its engines have counted so far."""
        p, d = ([engine.metrics() for engine in side] for side in (self.prefills, self.decodes))
        totals = {"computed": sum(one.get(CACHED, 0.0) for one in p)}
        for name, side in (("p_cpu", self.prefills), ("d_cpu", self.decodes)):
            totals[name] = sum(engine.process.cpu_seconds() for engine in side)
        written = [one[name] for one in (*p, *d) for name in WRITTEN if name in one]
        if written:
            totals |= {"written": sum(written), "lacked": sum(one.get(LACKED, 0.0) for one in d)}
        return totals

    def rest(self) -> None:
        """Let it stand still until it is asked, if it is to."""
        for engine in self.engines if self.paused else ():
            engine.process.pause()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let its processes run. Raise ProcessDied if an engine has ended meanwhile."""
        for engine in self.engines if self.paused else ():
            engine.process.resume()
        try:
            yield
        finally:
            for engine in self.engines:
                if not engine.process.alive:
                    raise ProcessDied(f"{engine.name} has ended; the end of its log:\n{engine.process.tail()}")
            self.rest()


@dataclass(frozen=True)
class PairSettings:
    """Sizes and flags of a pair that has not the usual ones."""

    p_tp: int = 1
    decodes: int = 1  # of this package's pair
    alone: str = ""  # "p" or "d": router and client run on the other side's core, and before its engines
    p_kv_bytes: int = 0  # P's cache, if not as large as D's
    router: tuple[str, ...] = ()  # flags of this package's
    config: Mapping[str, Any] = field(default_factory=dict)  # kv_connector_extra_config of this package's engines


def extra_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of --regroup and --verify."""
    return {"verify": "full" if args.verify else "off", **({"regroup": "always"} if args.regroup else {})}


def cores(alone: str = "") -> tuple[list[int], list[int]]:
    """Return a core for each engine, and those for router and client: others, where there are enough."""
    have = sorted(os.sched_getaffinity(0))
    if len(have) < ENGINES:
        raise SystemExit(f"{ENGINES} engines need a core each, and there is {len(have)}")
    if len(have) >= ENGINES + 2:
        return have[:ENGINES], have[ENGINES:]
    return have[:ENGINES], [core for core in have if not alone or core != have["pd".index(alone)]]


@contextmanager
def started(
    cluster: Cluster, wanted: str, shape: dict[str, Any], pair: PairSettings = PairSettings()
) -> Iterator[dict[str, LoadedSystem]]:
    """Start the wanted systems. NIXL is left out, with a word, where its package cannot be had."""
    model, engine_cores = ensure(MODEL), _divided(pair.alone)
    polite = ("bash", "-c", POLITE) if pair.alone else ()

    def spec(core: int, name: str, role: str, **more: Any) -> EngineSpec:
        prefix = (*polite, "taskset", "-c", str(engine_cores[core]))
        return EngineSpec(name, model, role=role, prefix=prefix, **{**shape, **more})

    def of_pair(name: str, role: str, **more: Any) -> EngineSpec:
        if role != "kv_producer":
            return spec(1, name, role, **more)
        return spec(0, name, role, tp=pair.p_tp, kv_bytes=pair.p_kv_bytes or shape["kv_bytes"], **more)

    systems: dict[str, LoadedSystem] = {}
    with ExitStack() as ends:
        for letter in wanted:
            if letter == "d" and not install_nixl():
                say("(d) is left out: the package nixl cannot be installed here")
                continue
            if letter == "a":
                systems["a"] = _colocated(cluster, spec)
            elif letter == "b":
                systems["b"] = _ours(cluster, of_pair, pair)
            else:
                systems[letter] = _in_tree(cluster, of_pair, letter, ends)
            systems[letter].rest()
        yield systems


@contextmanager
def started_on_ascend(cluster: Cluster, wanted: str, shape: dict[str, Any]) -> Iterator[dict[str, LoadedSystem]]:
    """Start pairs under vllm-ascend itself, on a CANN in host memory."""
    sizes = {name: size for name, size in shape.items() if name != "kv_bytes"}
    settings = SiteSettings(MODEL, shape["kv_bytes"], sizes, _divided())
    build, systems = older_host_build(), dict[str, LoadedSystem]()
    with ExitStack() as ends:
        for letter in wanted:
            site = ContenderSite(ON_ASCEND[letter], PairShape(1, 1), cluster, build, settings)
            ends.callback(site.stop_router)
            systems[letter] = LoadedSystem(site.url, [site.p], [site.d], paused=letter != "b")
            systems[letter].rest()
        yield systems


def _divided(alone: str = "") -> list[int]:
    """Return a core for each engine. What is started from here on has the others, except for the engines."""
    engine_cores, rest = cores(alone)
    os.sched_setaffinity(0, rest)
    say(f"engines on cores {_listed(engine_cores)}, one thread each; routers and client on {_listed(rest)}")
    return engine_cores


def _colocated(cluster: Cluster, spec: Any) -> LoadedSystem:
    engines = cluster.start(*(spec(core, f"whole-{core}", "plain") for core in range(ENGINES)))
    front = cluster.metaserver([], engines, how=MetaserverSpec(("--no-canary",)))
    return LoadedSystem(front.url, engines, front=front)


def _ours(cluster: Cluster, of_pair: Any, pair: PairSettings) -> LoadedSystem:
    port = cluster.port()
    config = {**cluster.push_config(verify="off"), **pair.config}
    del config["trace_dir"]
    d_side = {**config, "metaserver_urls": [f"http://127.0.0.1:{port}"]}
    d_names = [f"ours-d{number}" for number in range(pair.decodes)] if pair.decodes > 1 else ["ours-d"]
    specs = [of_pair("ours-p", "kv_producer", extra=config)]
    specs += [of_pair(name, "kv_consumer", extra=d_side) for name in d_names]
    firsts = range(0, len(specs), STARTED_AT_ONCE)
    p, *d = (engine for first in firsts for engine in cluster.start(*specs[first : first + STARTED_AT_ONCE]))
    front = cluster.metaserver([p], d, port, MetaserverSpec((*STRICT, *pair.router)))
    return LoadedSystem(front.url, [p], d, front=front)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _in_tree(cluster: Cluster, of_pair: Any, letter: str, ends: ExitStack) -> LoadedSystem:
    """Start a pair behind vLLM's example of a router for its connector."""
    p, d, _ = (start_mooncake if letter == "c" else start_nixl)(cluster, of_pair, 1)
    if letter == "c":
        bootstrap = int(p.spec.environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"])
        router = routers.mooncake(p, d, bootstrap, cluster.port(), cluster.logs)
    else:
        router = routers.toy(p, d, cluster.port(), cluster.logs)
    ends.callback(router.stop)
    return LoadedSystem(router.url, [p], [d], paused=True)
