# SPDX-License-Identifier: Apache-2.0
"""Sets of engines under vllm-ascend itself, on a CANN in host memory or on NPUs.

In host memory vllm-ascend, vLLM, torch_npu and Mooncake are the pinned ones of a release, unmodified. Sets with
`regroup_kernels: own` use `csrc/npu`, built against that torch_npu, whose kernels run on the emulated cores; the others
torch_npu's operators. Where a P's caches are late, an operator's results get there only after some time, so that code
that does not wait for the event pushes old bytes. docs/building.md describes the environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host_build import BASE, OLDER, HostBuild
from pairs import FORKED, Pair

from tools.support.cluster import STRICT, Cluster
from tools.support.compare import AnswerTally
from tools.support.cutting import Cutter
from tools.support.fork_server import ForkServers
from tools.support.models import RECIPES, ensure
from tools.support.spec import CONNECTOR, PATIENT, EngineSpec

CHUNK = 512
UNCUT = 8192  # of one engine that attends to int8 behind a cut or a prefix, where P has the model's dtype
BLOCK = 128  # vllm-ascend ignores other values
# DeepSeek-V4: blocks of 32 entries, the shortest. Those of a compressor's entries have 2 tokens, so many are needed.
# With one rank in the core's process vllm-ascend 0.30 does not start: vLLM's core sets the block size to the smallest
# group's, and the indexer then looks up its sizes by that (KeyError: 2).
APART = ("--distributed-executor-backend", "mp")
SHORT_BLOCKS = ("--block-size", "32", "--kv-cache-memory-bytes", str(192 << 20), *APART)
EQUAL = 1e-4  # between two log-probabilities of a token, where both are computed alike
# The same where sums round otherwise: a quarter more than the furthest in runs of 44 sets (docs/building.md). So one
# token's keys and values of one layer are not made out; test_planted.py has such pairs in a dtype that does.
ROUNDED = 0.125
# The same where an indexer picks among more tokens than it may: at a tie it picks another one. P and D alone, without a
# transfer, were up to 0.11 apart after ten prompts, and the pair up to 0.15 from either.
PICKED = 0.25
# Of 300 tokens of an engine with heads in int8, the best after its own prefill of all before was up to 0.42 better.
INT8_APART = 0.5
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Machine:
    """Interpreter, plug-ins and environment of the engines of a set."""

    python: str
    stands_in: bool  # a CANN in host memory, which computes in any dtype and rounds alike in every batch
    plugins: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    forks: ForkServers | None = None

    @classmethod
    def host(cls, build: HostBuild, forks: ForkServers | None = None) -> Machine:
        keys = {"mooncake_protocol": "tcp"}
        # Delays differ from run to run; a set's first line says how to have the same again.
        drawn = {"STAND_IN_SEED": os.environ.get("STAND_IN_SEED") or str(secrets.randbelow(1_000_000))}
        environment = {**build.variables(), "MC_FORCE_TCP": "1", **drawn}
        # Cores and workers do not repeat imports of half a minute, and the cores are the device.
        plugins = (*build.plugins, *FORKED, PATIENT)
        return cls(str(build.python), True, plugins, environment, keys, forks)


NPUS = Machine(sys.executable, stands_in=False)


@dataclass(frozen=True)
class Side:
    """One engine of a set."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    servers: int = 1  # with dp: one for each rank, or one for all
    dcp: int = 1
    pcp: int = 1
    flags: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)  # further keys of kv_connector_extra_config
    graphs: str = ""  # cudagraph_mode; empty: eager
    drafts: int = 0  # drafted tokens, if not as many as the set says
    late_us: int = 0  # longest delay of an operator's results on their way to the cache
    delay_us: int = 0  # longest delay of a task of its streams before it runs
    faults: str = ""  # file that plants faults: plugin/ascend_host/faults.py
    switches: Mapping[str, str] = field(default_factory=dict)  # of vllm-ascend, by environment variable
    repaired: bool = False  # a fault of vllm-ascend is mended: plugin/ascend_host/repairs.py

    @property
    def divided(self) -> tuple[str, ...]:
        """Return the arguments for context parallelism in runs of a block, as vllm-ascend has it with connectors."""
        if self.dcp * self.pcp == 1:
            return ()
        return (
            f"--decode-context-parallel-size={self.dcp}",
            f"--cp-kv-cache-interleave-size={BLOCK}",
            f"--block-size={BLOCK}",
        )

    @property
    def graph_flags(self) -> tuple[str, ...]:
        if not self.graphs:
            return ("--enforce-eager",)
        sizes = [64, 128, 256, CHUNK] if self.graphs == "PIECEWISE" else [1, 2, 4, 8]  # of prompts, of answers
        config = {"cudagraph_mode": self.graphs, "cudagraph_capture_sizes": sizes}
        return ("--compilation-config", json.dumps(config))

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.pcp * self.dp

    @property
    def sums(self) -> tuple[object, ...]:
        """Return what decides how its ranks divide their sums."""
        return self.tp, self.switches, any("enable_shared_expert_dp" in flag for flag in self.flags)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "STAND_IN_DEVICES": "8",
            "STAND_IN_LATE_US": str(self.late_us),
            "STAND_IN_DELAY_US": str(self.delay_us),
            **({"ASCEND_HOST_FAULTS": self.faults} if self.faults else {}),
            **({"ASCEND_HOST_REPAIRED": "1"} if self.repaired else {}),
        }


@dataclass(frozen=True)
class Engines:
    """A P, a D, and the server in front of them."""

    title: str
    model: str = "gqa"
    p: Side = Side()
    d: Side = Side()
    dtype: str = "float32"
    flags: tuple[str, ...] = ()  # of both
    verify: str = "full"
    max_len: int = 2048
    draft: Mapping[str, Any] = field(
        default_factory=dict
    )  # --speculative-config of both; its model by the recipe's name
    release: str = BASE  # of vllm-ascend, on stand-ins
    beside: tuple[Mapping[str, Any], ...] = ()  # other connectors of both, behind ours in vllm-ascend's MultiConnector
    cut: bool = False  # streams are cut on their way from D, of which the front door has two addresses then

    def __str__(self) -> str:
        return self.title

    @property
    def indexed(self) -> bool:
        return self.model.startswith(("dsv32", "glm5"))

    @property
    def one_way(self) -> bool:
        """Return whether prefill and decode compute a token alike, wherever a prompt is cut.

        vllm-ascend's MLA has two ways, which round differently; a recurrence rounds its state at the end of each step.
        With DCP an indexer's attention has two: it merges the ranks' parts in steps without a prefill alone. And behind
        given tokens P has attended to its own cache, where D with its heads in int8 had to that.
        """
        merging = self.indexed and max(self.p.dcp, self.d.dcp) > 1
        return (
            not merging and not self.in_int8 and self.model not in ("mla", "dsv3", "mtp", "qwen3next", "qwen3next-mtp")
        )

    @property
    def in_int8(self) -> bool:
        """Return whether D has its heads in int8. Then neither P nor D can answer alone, and one engine more does."""
        return RECIPES[self.model].int8

    @property
    def starts_with_p_token(self) -> bool:
        """Return whether requests start with P's token: of the older release, where D's scheduler is vLLM's own."""
        recomputes = any("recompute_scheduler_enable" in flag for flag in self.d.flags)
        return self.release != OLDER or not recomputes

    @property
    def devices(self) -> int:
        """Return how many devices the set needs."""
        alone = self.alone.devices if self.in_int8 else 0
        return self.p.devices + self.d.devices + alone

    @property
    def alone(self) -> Side:
        """Return the engine that answers where neither P nor D can alone."""
        return Side(self.p.tp, flags=("--no-enable-prefix-caching",))

    def start(self, machine: Machine, cluster: Cluster) -> Pair:
        port = cluster.port()
        p, *d = cluster.start(*self.specs(machine, cluster, f"http://127.0.0.1:{port}"))
        # With a pipeline, vllm-ascend's P keeps the sampled token on its last stage, and with PCP it does not decode:
        # alone it is right for one token only.
        alone = d[0] if self.p.pp > 1 or self.p.pcp > 1 else d.pop() if self.in_int8 else None
        tally = self.tally if machine.stands_in else rounded()
        cutter = Cutter([*d, *d]) if self.cut else None
        front = cluster.metaserver([p], d if cutter is None else cutter.addresses, port, STRICT)
        one_way, computes = self.one_way, not self.in_int8
        return Pair(
            cluster, front, p, tuple(d), tally, alone=alone, one_way=one_way, decode_computes=computes, cutter=cutter
        )

    def specs(self, machine: Machine, cluster: Cluster, url: str) -> list[EngineSpec]:
        """Return P and all servers of D, for a metaserver at `url`, and the engine alone if the set has one."""
        specs = self._specs(machine, cluster, url)
        if self.in_int8:
            specs.append(self._engine(machine, "alone", "plain", self.alone, {}, UNCUT))
        return [_noted(spec, cluster) for spec in specs] if machine.stands_in else specs

    def _specs(self, machine: Machine, cluster: Cluster, url: str) -> list[EngineSpec]:
        p, d = self.p, self.d
        extra = cluster.push_config(**self._keys(machine, p))
        first = self._engine(machine, "p", "kv_producer", p, extra)
        extra = cluster.push_config(url, **self._keys(machine, d))
        if d.servers == 1:
            return [first, self._engine(machine, "d", "kv_consumer", d, extra)]
        assert d.servers == d.dp
        apart = {"dp_local": 1, "dp_rpc_port": cluster.port()}
        ranks = [self._engine(machine, f"d{n}", "kv_consumer", d, extra, dp_rank=n, **apart) for n in range(d.dp)]
        return [first, *ranks]

    @property
    def tally(self) -> AnswerTally:
        """Return the tally, with a tolerance where bfloat16 rounds differently.

        Attention merged from parts of the keys rounds differently from attention over all or over other parts. So does
        a D with few blocks, which computes again what it preempts. Two ranks each round their half of a sum, with
        tokens divided in another order, and one that has a shared expert whole rounds once.
        """
        merges = self.p.dcp * self.p.pcp != self.d.dcp
        recomputes = any("num-gpu-blocks" in flag for flag in self.d.flags)
        otherwise = not self.one_way and (merges or recomputes)
        otherwise = otherwise or (self.dtype == "bfloat16" and self.p.sums != self.d.sums)
        if not otherwise:
            return AnswerTally(limit=EQUAL)
        if self.in_int8:
            return dataclasses.replace(rounded(), tie=INT8_APART)
        return self._rounded

    @property
    def _rounded(self) -> AnswerTally:
        return dataclasses.replace(rounded(), limit=PICKED) if self.indexed else rounded()

    def behind_given_tokens(self, pair: Pair) -> Pair:
        """Return the pair with the tally of answers that go on: P prefills what one engine has decoded in steps."""
        if self.one_way:
            return pair
        # P attends to given tokens in its own dtype.
        tally = AnswerTally(tie=INT8_APART, excused_share=0.6) if self.in_int8 else self._rounded
        return dataclasses.replace(pair, tally=tally)

    def _keys(self, machine: Machine, side: Side) -> dict[str, Any]:
        return {"verify": self.verify, "first_token_wait_s": 10.0, **machine.keys, **side.keys}

    def _engine(
        self,
        machine: Machine,
        name: str,
        role: str,
        side: Side,
        extra: dict[str, Any],
        chunk: int = CHUNK,
        **ranks: Any,
    ) -> EngineSpec:
        draft = dict(self.draft)
        if "model" in draft:
            draft["model"] = str(ensure(draft["model"]))
        if side.drafts:
            draft["num_speculative_tokens"] = side.drafts
        # An NPU's attention takes no float32.
        dtype = "float16" if self.dtype == "float32" and not machine.stands_in else self.dtype
        connector = CONNECTOR
        if self.beside:
            ours = {"kv_connector": CONNECTOR, "kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
            extra = {"connectors": [{"kv_role": role, **one} for one in (ours, *self.beside)]}
            connector = "MultiConnector"
        common = ("--dtype", dtype, "--kv-cache-memory-bytes", str(32 << 20))
        return EngineSpec(
            f"{self.title}-{name}".replace(" ", "-"),
            ensure(self.model),
            role=role,
            tp=side.tp,
            pp=side.pp,
            pcp=side.pcp,
            dp=side.dp,
            **ranks,
            max_len=self.max_len,
            draft=draft,
            chunk=chunk,
            policy="fail",
            extra=extra,
            connector=connector,
            python=machine.python,
            npu=True,
            plugins=machine.plugins,
            arguments=(*common, *side.graph_flags, *side.divided, *self.flags, *side.flags),
            environment={**machine.environment, **side.switches, **(side.environment if machine.stands_in else {})},
        )


def _noted(spec: EngineSpec, cluster: Cluster) -> EngineSpec:
    """Let the stand-ins note what the processes of an engine ask of them (seen.py)."""
    folder = cluster.directory / "notes" / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    return dataclasses.replace(spec, environment={**spec.environment, "STAND_IN_NOTES": str(folder)})


def rounded() -> AnswerTally:
    """Return a tally that excuses close tokens: sums in another order round differently.

    Of unequal sizes P alone and D alone may give other answers to 7 of 24 prompts (`shapes dsa 4to2`, where 7 of 12
    answers were excused once, the largest share with right bytes).
    """
    return AnswerTally(tie=0.125, excused_share=0.6, judged_from=12, limit=ROUNDED)


def additional(**settings: Any) -> tuple[str, ...]:
    """Return vllm-ascend's own settings as arguments. vLLM takes the last --additional-config only."""
    return ("--additional-config", json.dumps(settings))


def few_blocks(count: int) -> tuple[str, ...]:
    return ("--num-gpu-blocks-override", str(count))
