# SPDX-License-Identifier: Apache-2.0
"""A seed's decisions before anything happens: the cluster's shape, its timers, its load, and its faults."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from vllm_ascend_pd.config import PushConfig, RegroupConfig, Timers, WireConfig
from vllm_ascend_pd.geometry.layout import (
    ALL,
    COMPRESSED,
    STATE,
    WINDOW,
    CacheGeometry,
    Group,
    LayerKind,
    Region,
    section_of,
)

MODEL = "model"
DRAFT = "draft.0"
STATES = -1  # instead of a window's length: the group keeps states
HEADS, GROUPS = "heads", "groups"  # the sections of a state: one is divided by heads, the other is on every rank
FUSED = 4
FIRST_WAIT_S = 0.2
VOCABULARY = 1 << 20
DIGEST = "how it is chosen"


@dataclass(frozen=True, slots=True)
class FirstFaults:
    """Probabilities of faults on the way of P's first token."""

    lost: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    mixed_up: float = 0.0  # another transfer's token arrives
    forged: float = 0.0  # not in the vocabulary


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per opportunity, and rates per simulated second."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0  # a message that takes seconds, or minutes
    write_error: float = 0.0
    write_slow: float = 0.0
    http: float = 0.0
    leave: float = 0.0  # clients that disconnect
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
    partition: float = 0.0  # the side channel of a P worker is cut, its data path is not
    silent_death: float = 0.0  # share of deaths that no peer notices
    double_dispatch: float = 0.0
    forged: float = 0.0  # clients that name a metaserver of their own
    unissued: float = 0.0  # a peer accepts nothing of a write
    late_event: float = 0.0  # a layer is computed long after its hook, and after later layers
    writer_dies: float = 0.0  # the transfer engine raises
    undrafted: float = 0.0  # the draft model does not run in a step
    astray: float = 0.0  # one side of a source and a target comes late, twice or never
    write_spread: float = 0.0  # the first bytes of a write land long before its last
    cut_stopped: float = 0.0  # a writer that is stopped is also cut off: never drawn, no rule bears it
    orphans: float = 0.0  # share of engines whose ranks outlive the scheduler
    unread: float = 0.0  # a load is reported outside vLLM's read of a step's outputs
    revocation: float = 0.0  # an attempt to revoke access fails, before or after it has cut the peers off


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Shape of one engine."""

    tp: int
    pp: int
    block_size: int
    blocks: int
    head_major: bool
    drafts: bool = False  # whether it has the draft model
    late: bool = False  # whether its first stage has all layers but one for each other stage
    dcp: int = 1  # context parallelism
    pcp: int = 1
    interleave: int = 1

    @property
    def covers(self) -> int:
        """Return the tokens covered by a block of the table."""
        return self.block_size * self.dcp * self.pcp


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """One seed's world."""

    prefill: tuple[EngineShape, ...]
    decode: tuple[EngineShape, ...]
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
    first: bool = False  # D starts with P's first token
    first_faults: FirstFaults = FirstFaults()
    indexed: tuple[int, ...] = ()  # layers with an indexer beside them: one key per token, on every rank
    index_cell: int = 1
    quantised: int = 0  # bytes of the scale beside each cell of an attention; 0: none
    windows: tuple[
        int, ...
    ] = ()  # of each group of layers, or STATES; 0: all tokens matter; -n: and n of them have one entry
    group_of: tuple[int, ...] = ()  # of each attention
    scales: tuple[int, ...] = ()  # of each group: its block size in the engine's blocks
    faults: Faults = field(default_factory=Faults)
    p_first: float = 0.0  # share of requests that P computes before D knows them
    at_once: float = 0.0  # share of those that go to both at the same time
    ahead: bool = False  # P's scheduler plans a step before the results of the one before, as vLLM does by default
    shared: float = 0.0  # share of prompts that begin as one before, so that P's requests share blocks

    @property
    def kind(self) -> bool:
        """Return whether every transfer must end well: nothing fails, and no deadline is near."""
        t = self.timers
        soon = t.recv_deadline_s if not (self.p_first or self.at_once) else min(t.recv_deadline_s, t.hold_s, t.meet_s)
        return self.faults == Faults() and soon >= 600.0 and t.preempt_drain_s >= 1.0

    @property
    def plain(self) -> bool:
        """Return whether it is like the first simulator's worlds.

        One group of plain attentions, no drafts, and requests that go to D first.
        """
        more = (
            self.first,
            self.indexed,
            self.quantised,
            self.windows,
            self.scales,
            self.p_first,
            self.at_once,
            self.shared,
            self.ahead,
        )
        shapes = (*self.prefill, *self.decode)
        return not any(more) and not any(shape.drafts or shape.covers > shape.block_size for shape in shapes)

    def push(self) -> PushConfig:
        """Return the configuration of P's workers."""
        wire = WireConfig(transfer_timeout_s=self.transfer_timeout_s, fuse_layers=FUSED)
        return PushConfig(wire=wire, regroup=self.regroup, timers=self.timers)

    def names(self) -> tuple[str, ...]:
        return (*(name for i in range(self.layers) for name in self._layer(i)), DRAFT)

    def _layer(self, i: int) -> tuple[str, ...]:
        if self.group_of and self.windows[self.group_of[i]] == STATES:
            return section_of(f"layer.{i}.mixer", HEADS), section_of(f"layer.{i}.mixer", GROUPS)
        attention = f"layer.{i}.attn"
        return (f"layer.{i}.indexer.k", attention) if i in self.indexed else (attention,)

    def _cuts(self, shape: EngineShape) -> list[int]:
        """Return the ends of the stages: even, or as late as possible."""
        rest = self.layers - shape.pp if shape.late else 0
        return [self.layers * i // shape.pp if not rest else rest + i for i in range(1, shape.pp)]

    def geometry(self, shape: EngineShape) -> CacheGeometry:
        """Return the engine's cache as a reservation describes it."""
        tables, world = self.tables(shape), shape.dcp * shape.pcp
        # shorter blocks are padded, because the groups share memory
        page = max(group.block_size for group in tables) // world
        cuts = [0, *self._cuts(shape), self.layers]
        stages = [tuple(name for i in range(a, b) for name in self._layer(i)) for a, b in itertools.pairwise(cuts)]
        # With DCP every rank has all keys.
        keys = Region("key", page * shape.dcp * self.index_cell, 0, self.index_cell, self.index_cell)
        if shape.drafts:
            stages[-1] = (*stages[-1], DRAFT)
        packing = "kv" if self.regions == 1 else "k,v"
        words = "/".join(["int8", "scale"] * self.regions) if self.quantised else "bf16"
        kinds = []
        for index, group in enumerate(tables):
            names = [n for n in self.names() if self._group(n) == index and (shape.drafts or n != DRAFT)]
            sections = {word: tuple(name for name in names if name.endswith(f"/{word}")) for word in (HEADS, GROUPS)}
            indexers = tuple(name for name in names if ".indexer." in name)
            attentions = tuple(n for n in names if "/" not in n and n not in indexers)
            of: tuple[tuple[tuple[str, ...], int, str, str, tuple[Region, ...]], ...] = (
                (attentions, self.kv_heads, words, packing, self._regions(shape, group.block_size // world, page)),
                (indexers, 1, "bf16", "key", (keys,)),
                (sections[HEADS], self.kv_heads, "bf16", "state", self._states(shape, self.kv_heads, 2)),
                (sections[GROUPS], 1, "bf16", "state", self._states(shape, 1, 1)),
            )
            kinds += [
                (LayerKind(heads, word, pack, regions, index, whole=shape.dcp > 1 and some is indexers), set(some))
                for some, heads, word, pack, regions in of
                if some
            ]
        divided = [one for one in kinds if not one[0].whole]
        head = divided[0] if len(divided) < len(kinds) else next(one for one in kinds if self.names()[0] in one[1])
        kinds.sort(key=lambda one: one is not head)
        kind_of = [index for name in itertools.chain(*stages) for index, one in enumerate(kinds) if name in one[1]]
        first, *others = (kind for kind, _ in kinds)
        return CacheGeometry(
            block_size=tables[first.group_index].entries // world,
            kv_heads=first.kv_heads,
            tp_size=shape.tp,
            dtype=first.dtype,
            packing=first.packing,
            regions=first.regions,
            stages=tuple(stages),
            drafter="a draft model" if shape.drafts else "",
            drafts=(DRAFT,) if shape.drafts else (),
            others=tuple(others),
            kind_of=tuple(kind_of) if others else (),
            groups=tables if self.windows else (),
            group_index=first.group_index,
            dcp=shape.dcp,
            pcp=shape.pcp,
            interleave=shape.interleave,
        )

    def tables(self, shape: EngineShape) -> tuple[Group, ...]:
        size = shape.covers
        grouped = zip(self.windows, self.scales, strict=True)
        rules = {0: ALL, STATES: STATE}
        return tuple(
            Group(size * k, rules.get(n, WINDOW if n > 0 else COMPRESSED), 0 if n in rules else abs(n))
            for n, k in grouped
        ) or (Group(size),)

    def _group(self, name: str) -> int:
        if name == DRAFT:  # an attention
            return next((index for index, n in enumerate(self.windows) if n != STATES), 0)
        return self.group_of[int(name.split(".")[1])] if self.group_of else 0

    def _states(self, shape: EngineShape, kv_heads: int, regions: int) -> tuple[Region, ...]:
        heads, cell = max(1, -(-kv_heads // shape.tp)), 2 + regions
        return tuple(Region(f"state{regions}.{i}", heads * cell, cell, 0, cell) for i in range(regions))

    def _regions(self, shape: EngineShape, size: int, page: int) -> tuple[Region, ...]:
        """Return the regions of attentions with blocks of `size` tokens, which take the space of `page` tokens."""
        heads, regions = max(1, -(-self.kv_heads // shape.tp)), []
        for name in "kv"[: self.regions]:
            for word, width in ((name, self.cell), (f"{name} scale", self.quantised)):
                cell = width * (size if self.opaque else 1)
                if self.opaque:
                    token, head = 0, cell
                elif shape.head_major:
                    token, head = cell, cell * size
                else:
                    token, head = cell * heads, cell
                if width:
                    regions.append(Region(word, heads * page * width, head, token, cell))
        return tuple(regions)

    def grouped(
        self, windows: tuple[int, ...], group_of: tuple[int, ...], scales: tuple[int, ...]
    ) -> SimulationSettings:
        """Return this world with these groups. Windows are pushed where P's blocks begin at borders of D's.

        P's requests share no blocks there: those of a window are freed at other times than the rest.
        """
        size = min(shape.block_size for shape in (*self.prefill, *self.decode))
        prefill, decode = (
            tuple(replace(shape, blocks=shape.blocks * len(windows) + 1) for shape in side)
            for side in (self.prefill, self.decode)
        )
        decode = tuple(replace(shape, block_size=size, blocks=2 * shape.blocks) for shape in decode)
        if set(windows) == {STATES}:
            prefill, decode = (tuple(replace(shape, drafts=False) for shape in side) for side in (prefill, decode))
        more: dict[str, Any] = {"windows": windows, "group_of": group_of, "scales": scales}
        return replace(self, prefill=prefill, decode=decode, layers=len(group_of), shared=0.0, **more)

    def undivided(self) -> SimulationSettings:
        """Return this world without context parallelism."""
        prefill, decode = (
            tuple(replace(shape, dcp=1, pcp=1, interleave=1) for shape in side) for side in (self.prefill, self.decode)
        )
        return replace(self, prefill=prefill, decode=decode)

    def settled(self) -> SimulationSettings:
        """Return this world without what each seed draws from a stream of its own: the seeds of mutations stay."""
        faults = replace(self.faults, write_spread=0.0, orphans=0.0, unread=0.0)
        return replace(self, ahead=False, shared=0.0, faults=faults)

    def without_faults(self) -> SimulationSettings:
        """Return this world without faults, and with no deadline near."""
        patient = replace(self.timers, recv_deadline_s=600.0, stall_timeout_s=600.0, ready_timeout_s=600.0)
        return replace(self, faults=Faults(), timers=patient)

    def lengthened(self, tokens: int, chunk: int) -> SimulationSettings:
        """Return this world with one engine a side, few layers, and prompts of up to `tokens` tokens."""

        def long(shape: EngineShape) -> EngineShape:
            return replace(shape, block_size=128, blocks=2 * (tokens // 128 + 1))

        prefill, decode = tuple(map(long, self.prefill[:1])), tuple(map(long, self.decode[:1]))
        layers = min(self.layers, 3)
        small = {
            "layers": layers,
            "cell": 1,
            "regions": 1,
            "quantised": 0,
            "indexed": (),
            "windows": (),
            "group_of": (),
            "scales": (),
        }
        return replace(self, prefill=prefill, decode=decode, tokens=tokens, chunk=chunk, requests=4, room=64, **small)  # type: ignore[arg-type]


def draw(seed: int, requests: int | None = None) -> SimulationSettings:
    """Return the settings of a seed."""
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
    of_stages = random.Random(f"stages/{seed}")
    decode = tuple(
        replace(shape, pp=min(layers, of_stages.choice((1, 1, 1, 2, 3))), late=of_stages.random() < 0.5)
        for shape in decode
    )
    drawn = SimulationSettings(
        prefill=prefill,
        decode=decode,
        layers=layers,
        quantised=_quantised(random.Random(f"quantised/{seed}")),
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
            revocation=random.Random(f"revocation/{seed}").choice((0.0, 0.0, 0.3, 0.7)),
            undrafted=of_drafts.choice((0.0, 0.0, 0.01, 0.05)),
        ),
        # Cells are tiny here: their spans would regroup nearly all pushes.
        regroup=RegroupConfig(regroup=rng.choice(("never", "never", "never", "always", "auto")), regroup_min_span=8),
        slots=rng.choice((1, 2, 4)),
        slot_destinations=rng.choice((1, 2, 4)),
        room=rng.choice((1, 2, 8)),
    )
    drawn = _states(random.Random(f"states/{seed}"), _groups(random.Random(f"groups/{seed}"), drawn))
    drawn = _compressed(random.Random(f"compressed/{seed}"), drawn)
    drawn = _parts(random.Random(f"parts/{seed}"), drawn)
    drawn = _orders(random.Random(f"orders/{seed}"), drawn)
    drawn = replace(drawn, **_first(random.Random(f"first/{seed}")))
    drawn = replace(drawn, ahead=random.Random(f"ahead/{seed}").random() < 0.3)
    if not drawn.windows:
        drawn = replace(drawn, shared=random.Random(f"shared/{seed}").choice((0.0, 0.0, 0.5)))
    return drawn if drawn.faults == Faults() else replace(drawn, faults=replace(drawn.faults, **_later_faults(seed)))


def _orders(rng: random.Random, drawn: SimulationSettings) -> SimulationSettings:
    """Draw routers that do not send to D first, for some clusters or for part of one."""
    if rng.random() < 0.6 or drawn.windows or any(shape.drafts for shape in drawn.prefill):
        return drawn
    astray = rng.choice((0.0, 0.05, 0.2)) if drawn.faults != Faults() else 0.0
    return replace(
        drawn,
        p_first=rng.choice((0.0, 0.3, 1.0)),
        at_once=rng.choice((0.0, 0.5, 1.0)),
        timers=replace(drawn.timers, hold_s=rng.choice((2.0, 20.0, 120.0)), meet_s=rng.choice((1.0, 10.0, 30.0))),
        faults=replace(drawn.faults, astray=astray),
    )


def _states(rng: random.Random, drawn: SimulationSettings) -> SimulationSettings:
    """Draw layers that keep a state, beside the other attentions or alone."""
    if rng.random() < 0.88:
        return drawn
    if drawn.windows:
        windows = [STATES if rng.random() < 0.5 else n for n in drawn.windows]
        windows[rng.randrange(len(windows))] = STATES
        if set(windows) == {STATES}:
            bare = [replace(shape, drafts=False) for shape in (*drawn.prefill, *drawn.decode)]
            drawn = replace(drawn, prefill=tuple(bare[: len(drawn.prefill)]), decode=tuple(bare[len(drawn.prefill) :]))
        return replace(drawn, windows=tuple(windows))
    layers = max(drawn.layers, 2)
    group_of = [0, 1, *(rng.randrange(2) for _ in range(layers - 2))]
    rng.shuffle(group_of)
    return drawn.grouped((STATES, 0), tuple(group_of), (1, 1))


def _compressed(rng: random.Random, drawn: SimulationSettings) -> SimulationSettings:
    """Draw layers with one entry for several tokens, in the place of others."""
    if rng.random() < 0.7 or drawn.opaque or not drawn.windows:
        return drawn
    some = [-rng.randint(2, 5) if n != STATES and rng.random() < 0.6 else n for n in drawn.windows]
    return replace(drawn, windows=tuple(some))


def _parts(rng: random.Random, drawn: SimulationSettings) -> SimulationSettings:
    """Draw engines whose ranks divide the tokens: a tenth of the worlds where that is possible.

    Beside an indexer, whose keys each rank has whole, there is no PCP.
    """
    if rng.random() < 0.9 or drawn.windows or drawn.opaque:
        return drawn

    def divided(shape: EngineShape, pcps: tuple[int, ...]) -> EngineShape:
        dcp = rng.choice([n for n in (1, 2, 3, 4) if n == 1 or shape.tp % (drawn.kv_heads * n) == 0])
        runs = [n for n in (1, 2, 4, 8) if shape.block_size % n == 0]
        pcp, interleave = rng.choice(pcps), rng.choice(runs)
        return replace(shape, dcp=dcp, pcp=pcp, interleave=interleave if dcp * pcp > 1 else 1)

    prefill = tuple(divided(shape, (1,) if drawn.indexed else (1, 1, 2)) for shape in drawn.prefill)
    decode = tuple(divided(shape, (1,)) for shape in drawn.decode)
    if all(shape.covers == shape.block_size for shape in (*prefill, *decode)) and drawn.kv_heads > 1:
        drawn = replace(drawn, kv_heads=1)
        prefill, decode = (
            tuple(replace(shape, dcp=shape.tp, interleave=1) for shape in side) for side in (prefill, decode)
        )
    return replace(drawn, prefill=prefill, decode=decode)


def _first(rng: random.Random) -> dict[str, Any]:
    """Let a third of the worlds start with P's first token."""
    if rng.random() < 0.66:
        return {}
    faults = [rng.choice((0.0, 0.0, 0.05, 0.3)) for _ in range(5)]
    return {"first": True, "first_faults": FirstFaults(*faults)}


def _groups(rng: random.Random, drawn: SimulationSettings) -> SimulationSettings:
    """Draw layers with windows, of one length or of several, beside layers that need all tokens or alone."""
    if rng.random() < 0.7:
        return drawn
    count = rng.choice((1, 2, 2, 3))
    windows = [rng.choice((0, rng.randint(2, drawn.tokens))) for _ in range(count)]
    if count == 1:
        windows = [rng.randint(2, drawn.tokens)]
    layers = max(drawn.layers, count)
    group_of = [*range(count), *(rng.randrange(count) for _ in range(layers - count))]
    rng.shuffle(group_of)
    scales = [1 if drawn.opaque else rng.choice((1, 1, 2)) for _ in range(count)]
    return drawn.grouped(tuple(windows), tuple(group_of), tuple(scales))


def _quantised(rng: random.Random) -> int:
    return rng.choice((1, 2, 4)) if rng.random() < 0.15 else 0


def _indexers(rng: random.Random, layers: int) -> dict[str, Any]:
    """Draw indexers, beside all attentions or some."""
    if rng.random() < 0.7:
        return {}
    some = tuple(i for i in range(layers) if rng.random() < 0.5)
    return {"indexed": rng.choice((some, tuple(range(layers)))), "index_cell": rng.choice((1, 3, 4))}


def _engines(
    rng: random.Random, counts: tuple[int, ...], opaque: bool, size: int, tokens: int, *, prefill: bool
) -> tuple[EngineShape, ...]:
    shapes = []
    for _ in range(rng.choice(counts)):
        tp = rng.choice((1, 2, 2, 2, 3, 4) if prefill else (1, 2, 2, 2, 4))
        pp = rng.choice((1, 1, 1, 2)) if prefill else 1  # decode's is drawn later, so that seeds keep their other draws
        block = size if opaque else rng.choice((size, size, 2 * size))
        need = -(-tokens // block) + 1
        shapes.append(EngineShape(tp, pp, block, rng.choice((need + 1, 2 * need, 4 * need)), rng.random() < 0.5))
    return tuple(shapes)


def _timers(rng: random.Random) -> tuple[Timers, float]:
    """Draw the default timers, or all of them several times faster, in proportions that the configuration allows."""
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
    """Draw about half of the faults at once, each with its own strength; one seed in ten has none."""
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
    """Draw faults beneath a worker of P: in its device, its transfer engine."""
    return {
        "unissued": rng.choice((0.0, 0.0, 0.01, 0.05)),
        "late_event": rng.choice((0.0, 0.0, 0.05, 0.3)),
        "writer_dies": rng.choice((0.0, 0.0, 0.0, 0.001)),
    }


def _later_faults(seed: int) -> dict[str, float]:
    """Draw each fault from a stream of its own: without it, a seed is the world that it was before."""

    def drawn(name: str, *values: float) -> float:
        return random.Random(f"{name}/{seed}").choice(values)

    return {
        "write_spread": drawn("spread", 0.0, 0.0, 0.1, 0.5),
        "orphans": drawn("orphans", 0.0, 0.3, 1.0),
        "unread": drawn("unread", 0.0, 0.0, 0.1, 1.0),
    }


def stage_geometry(g: CacheGeometry, stage: int) -> CacheGeometry:
    """Return the geometry that a worker of one stage describes."""
    names, begin = g.stages[stage], g.first_layer(stage)
    kind_of = g.kind_of[begin : begin + len(names)]
    here = sorted({0, *kind_of})
    return msgspec.structs.replace(
        g,
        stages=(names,),
        drafts=tuple(name for name in g.drafts if name in names),
        others=tuple(g.others[index - 1] for index in here[1:]),
        kind_of=tuple(map(here.index, kind_of)) if len(here) > 1 else (),
    )
