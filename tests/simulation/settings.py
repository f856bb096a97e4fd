# SPDX-License-Identifier: Apache-2.0
"""What a seed decides before anything happens: the cluster's shape, its timers, its load, and how unkind the world is."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_ascend_pd.config import PushConfig, RegroupConfig, Timers, WireConfig
from vllm_ascend_pd.geometry.layout import CacheGeometry, Kind, Region

MODEL = "model"
DRAFT = "draft.0"
FUSED = 4


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per opportunity, and rates per simulated second."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0  # a message that takes seconds, or minutes
    write_error: float = 0.0
    write_slow: float = 0.0
    http: float = 0.0
    leave: float = 0.0  # clients that give up
    preempt: float = 0.0
    submit_stall: float = 0.0  # a writer is stopped between its claim and its submission
    write_stop: float = 0.0  # a writer is stopped inside a write
    exchange_error: float = 0.0  # a rank cannot give its part of an exchange
    stop_prefill: float = 0.0
    stop_decode: float = 0.0
    kill_prefill: float = 0.0
    kill_decode: float = 0.0
    kill_metaserver: float = 0.0
    flap: float = 0.0  # a connection breaks, its process lives
    partition: float = 0.0  # the side channel of a P worker is cut, the data path is not
    silent_death: float = 0.0  # share of deaths that nobody is told of
    double_dispatch: float = 0.0
    forged: float = 0.0  # clients that name a metaserver of their own
    unissued: float = 0.0  # a peer takes nothing of a write
    late_event: float = 0.0  # a layer is computed long after its hook fired, and after later layers
    writer_dies: float = 0.0  # the transfer engine raises
    undrafted: float = 0.0  # the draft model does not run in a step


@dataclass(frozen=True, slots=True)
class Shape:
    """One engine."""

    tp: int
    pp: int
    block_size: int
    blocks: int
    head_major: bool
    drafts: bool = False  # whether it has the draft model


@dataclass(frozen=True, slots=True)
class Settings:
    """One seed's world."""

    prefill: tuple[Shape, ...]
    decode: tuple[Shape, ...]
    layers: int  # of the model itself
    kv_heads: int
    cell: int
    regions: int
    opaque: bool
    timers: Timers
    transfer_timeout_s: float
    quiet_s: float
    requests: int
    burst: int
    gap_s: float
    tokens: int
    chunk: int
    verify: bool
    regroup: RegroupConfig
    slots: int = 4  # staging: for each destination
    slot_destinations: int = 4
    room: int = 8  # D blocks in a slot
    indexed: tuple[int, ...] = ()  # the layers that have an indexer beside them: one key per token, on every rank
    index_cell: int = 1
    faults: Faults = field(default_factory=Faults)

    @property
    def kind(self) -> bool:
        """Whether every transfer must end well: nothing goes wrong, and no deadline is near."""
        return self.faults == Faults() and self.timers.recv_deadline_s >= 600.0 and self.timers.preempt_drain_s >= 1.0

    def push(self) -> PushConfig:
        """What P's workers are configured with."""
        wire = WireConfig(transfer_timeout_s=self.transfer_timeout_s, fuse_layers=FUSED)
        return PushConfig(wire=wire, regroup=self.regroup, timers=self.timers)

    def names(self) -> tuple[str, ...]:
        return (*(name for i in range(self.layers) for name in self._layer(i)), DRAFT)

    def _layer(self, i: int) -> tuple[str, ...]:
        attention = f"layer.{i}.attn"
        return (f"layer.{i}.indexer.k", attention) if i in self.indexed else (attention,)

    def geometry(self, shape: Shape) -> CacheGeometry:
        """The engine's cache as it would be told in a reservation."""
        heads = max(1, -(-self.kv_heads // shape.tp))
        cell = self.cell * (shape.block_size if self.opaque else 1)
        if self.opaque:
            token, head = 0, cell
        elif shape.head_major:
            token, head = cell, cell * shape.block_size
        else:
            token, head = cell * heads, cell
        block = heads * shape.block_size * self.cell
        cuts = [self.layers * i // shape.pp for i in range(shape.pp + 1)]
        stages = [tuple(name for i in range(a, b) for name in self._layer(i)) for a, b in itertools.pairwise(cuts)]
        keys = Region("key", shape.block_size * self.index_cell, 0, self.index_cell, self.index_cell)
        indexers = tuple(name for name in self.names() if ".indexer." in name)
        if shape.drafts:
            stages[-1] = (*stages[-1], DRAFT)
        return CacheGeometry(
            block_size=shape.block_size,
            kv_heads=self.kv_heads,
            tp_size=shape.tp,
            dtype="bf16",
            packing="kv" if self.regions == 1 else "k,v",
            regions=tuple(Region("kv"[i], block, head, token, cell) for i in range(self.regions)),
            stages=tuple(stages),
            drafter="a draft model" if shape.drafts else "",
            drafts=(DRAFT,) if shape.drafts else (),
            others=(Kind(1, "bf16", "key", (keys,), indexers),) if indexers else (),
        )


def draw(seed: int, requests: int | None = None) -> Settings:
    """The settings of a seed."""
    rng = random.Random(f"settings/{seed}")
    timers, timeout = _timers(rng)
    opaque = rng.random() < 0.15
    size = rng.choice((2, 4, 8))
    tokens = rng.choice((6, 12, 24, 40))
    prefill = _engines(rng, (1, 1, 2, 2, 3, 4), opaque, size, tokens, prefill=True)
    decode = _engines(rng, (1, 1, 2, 2, 3, 4), opaque, size, tokens, prefill=False)
    of_drafts = random.Random(f"drafts/{seed}")
    if of_drafts.random() < 0.3:
        prefill, decode = (
            tuple(replace(shape, drafts=of_drafts.random() < 0.75) for shape in side) for side in (prefill, decode)
        )
    layers = max(rng.choice((1, 2, 2, 3)), *(shape.pp for shape in prefill))
    return Settings(
        prefill=prefill,
        decode=decode,
        layers=layers,
        **_indexers(random.Random(f"kinds/{seed}"), layers),
        kv_heads=rng.choice((1, 2, 2, 4)),
        cell=rng.choice((1, 2, 3)),
        regions=rng.choice((1, 2)),
        opaque=opaque,
        timers=timers,
        transfer_timeout_s=timeout,
        quiet_s=timeout + timers.quiet_extra_s,
        requests=requests or 40,
        burst=rng.choice((1, 3, 8)),
        gap_s=rng.choice((0.05, 0.5, 4.0)),
        tokens=tokens,
        chunk=rng.choice((4, 8, 16, 64)),
        verify=rng.random() < 0.1,
        faults=replace(
            _faults(rng),
            **_device_faults(random.Random(f"device/{seed}")),
            undrafted=of_drafts.choice((0.0, 0.0, 0.01, 0.05)),
        ),
        # Cells are tiny here: by their spans nearly all pushes would be regrouped.
        regroup=RegroupConfig(regroup=rng.choice(("never", "never", "never", "always", "auto")), regroup_min_span=8),
        slots=rng.choice((1, 2, 4)),
        slot_destinations=rng.choice((1, 2, 4)),
        room=rng.choice((1, 2, 8)),
    )


def _indexers(rng: random.Random, layers: int) -> dict[str, Any]:
    """Layers that are unlike: beside all attentions, or some."""
    if rng.random() < 0.7:
        return {}
    some = tuple(i for i in range(layers) if rng.random() < 0.5)
    return {"indexed": rng.choice((some, tuple(range(layers)))), "index_cell": rng.choice((1, 3, 4))}


def _engines(
    rng: random.Random, counts: tuple[int, ...], opaque: bool, size: int, tokens: int, *, prefill: bool
) -> tuple[Shape, ...]:
    shapes = []
    for _ in range(rng.choice(counts)):
        tp = rng.choice((1, 2, 2, 2, 3, 4) if prefill else (1, 2, 2, 2, 4))
        pp = rng.choice((1, 1, 1, 2)) if prefill else 1
        block = size if opaque else rng.choice((size, size, 2 * size))
        need = -(-tokens // block) + 1
        shapes.append(Shape(tp, pp, block, rng.choice((need + 1, 2 * need, 4 * need)), rng.random() < 0.5))
    return tuple(shapes)


def _timers(rng: random.Random) -> tuple[Timers, float]:
    """The defaults, or everything several times faster, in the proportions that the configuration allows."""
    if rng.random() < 0.5:
        return Timers(stall_timeout_s=rng.choice((20.0, 120.0)), recv_deadline_s=rng.choice((40.0, 300.0))), 30.0
    timers = Timers(
        lease_s=rng.choice((2.0, 4.0)),
        margin_s=2.0,
        ready_timeout_s=rng.choice((2.0, 8.0)),
        stall_timeout_s=20.0,
        recv_deadline_s=rng.choice((5.0, 30.0)),
        preempt_drain_s=rng.choice((0.0, 0.2, 1.0)),
        quiet_extra_s=5.0,
    )
    return timers, 5.0


def _faults(rng: random.Random) -> Faults:
    """About half of the kinds at once, each at a strength of its own; one seed in ten has a kind world."""
    if rng.random() < 0.1:
        return Faults()

    def some(*values: float) -> float:
        return rng.choice(values) if rng.random() < 0.5 else 0.0

    return Faults(
        drop=some(0.01, 0.05, 0.2),
        double=some(0.02, 0.2),
        late=some(0.01, 0.05),
        write_error=some(0.01, 0.05),
        write_slow=some(0.01, 0.05),
        http=some(0.02, 0.1),
        leave=some(0.05, 0.2),
        preempt=some(0.05, 0.2),
        submit_stall=some(0.005, 0.02),
        write_stop=some(0.002, 0.01),
        exchange_error=some(0.005, 0.05),
        stop_prefill=some(0.01, 0.03),
        stop_decode=some(0.01, 0.03),
        kill_prefill=some(0.005, 0.02),
        kill_decode=some(0.003, 0.01),
        kill_metaserver=some(0.005, 0.01),
        flap=some(0.01, 0.05),
        partition=some(0.01, 0.03),
        silent_death=some(0.3, 1.0),
        double_dispatch=some(0.05),
        forged=some(0.05),
    )


def _device_faults(rng: random.Random) -> dict[str, float]:
    """Of what a worker of P stands on: its device, its transfer engine."""
    return {
        "unissued": rng.choice((0.0, 0.0, 0.01, 0.05)),
        "late_event": rng.choice((0.0, 0.0, 0.05, 0.3)),
        "writer_dies": rng.choice((0.0, 0.0, 0.0, 0.001)),
    }
