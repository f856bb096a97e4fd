# SPDX-License-Identifier: Apache-2.0
"""An engine step on P's worker: its metadata comes, its layers are computed, it ends.

Only the engine's thread runs this. A layer's hook takes no lock and waits for nothing: it records one event and puts an
entry into the writer's queue. Exchanges are made in registered order, whatever the order of the hooks.

When a layer is complete depends on its kind:
* A layer of the target model: when its hook fires. Its event is an earlier one if the engine has said when its cache
  was written (vllm-ascend does, before the attention): what leaves then does not wait for the attention.
* A layer of a draft model: when the step is over. The draft model runs after the target, once for each token that it
  drafts. The first call of a layer's hook covers the prompt's part, the others write behind it.
* An indexer's keys, a compressor's entries, a window beside compressed latents: when the hook of the attention in the
  same layer fires. They are written before it, without a hook. That attention need not have a cache of its own.
* A recurrent layer: when the step is over. It has no hook.
Any other layer whose hook did not fire was not computed: nothing of the step is pushed then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from vllm_ascend_pd.geometry.layout import attention_of
from vllm_ascend_pd.metadata import PrefillStep
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.prefill.worker.core.exchanges import Run
from vllm_ascend_pd.prefill.worker.core.planning import StepPlan
from vllm_ascend_pd.prefill.worker.core.push import Unit
from vllm_ascend_pd.prefill.worker.exchanger import Exchanger
from vllm_ascend_pd.prefill.worker.writer import Computed, Deciding, News, Sealed
from vllm_ascend_pd.shared.event import Event


class _Layers:
    """The step that the engine is computing."""

    def __init__(self, plan: StepPlan, layers: int) -> None:
        self.plan = plan
        self.missing = set(range(layers))
        self.drafted: set[int] = set()  # of those, layers of the draft model whose hook has fired
        self.events: dict[int, Event] = {}  # of layers that wait for earlier ones to be exchanged
        self.next = 0
        self.exchanged = False  # whether an exchange of this step was made


class Steps:
    def __init__(
        self,
        layers: Sequence[str],
        deciding: Deciding,
        record: Callable[[], Event],
        put: Callable[[News], None],
        clock: Callable[[], float],
        exchanging: Exchanger | None,
        drafts: Collection[str] = (),
        states: Collection[str] = (),
        titles: Sequence[str] = (),  # of the layers, for the trace
    ) -> None:
        self._names = tuple(layers)
        self._titles = titles or self._names
        self._layers = {name: index for index, name in enumerate(layers)}
        self._drafts = {self._layers[name] for name in drafts}
        self._states = {self._layers[name] for name in states}
        self._hooks = self._by_hook()
        self._deciding, self._record, self._put, self._clock = deciding, record, put, clock
        self._exchanging = exchanging
        self._current: _Layers | None = None
        self._written: tuple[str, Event] | None = None

    def begin(self, step: PrefillStep) -> None:
        """Take in a step's metadata and plan what its layers will push."""
        self.end()  # of the step before, if vLLM did not end it
        if step.empty:
            return
        with self._deciding() as core:
            plan = core.plans.begin(self._clock(), step)
        if plan.before is not None:
            self._computed_before(plan.before)
        if self._exchanging is not None:
            self._exchanging.prepare(plan)
            # Nothing depends on this event: exchanges run one after the other, and have waited for these layers when
            # they were made first. It only spares a second way to make one.
            event = self._record() if plan.catch_ups else None
            for run in plan.catch_ups:
                if event is not None:
                    self._exchanging.make(run, event)
        self._current = _Layers(plan, len(self._layers)) if step.slices else None

    def written(self, name: str) -> None:
        """Record that the cache is written of the layer whose hook fires next. Its name may be empty."""
        current = self._current
        if current is not None and (current.plan.direct or current.plan.exchanges):
            self._written = name, self._record()

    def computed(self, name: str) -> None:
        """Record that a layer's hook fired. Unknown names are ignored."""
        current, complete = self._current, self._hooks.get(name, ())
        (written, event), self._written = self._written or (name, None), None
        if written not in ("", name):
            event = None
        if current is None or not current.missing.issuperset(complete):
            return
        if self._drafts.intersection(complete):
            current.drafted.update(complete)
            return
        for each in complete:
            self._mark(current, each, event)
        if not current.missing:  # nothing is pushed after this layer: D need not wait for the rest of the forward
            self.end()

    def end(self) -> None:
        """End the step: announce states and draft layers, fail its pushes if a layer was not computed, and seal."""
        current, self._current, self._written = self._current, None, None
        if current is None:
            return
        never = sorted(current.missing - current.drafted - self._states)
        if never:
            with self._deciding() as core:
                core.offers.uncomputed(self._clock(), current.plan, self._names[never[0]])
        self._announce(current)  # also what failed: other ranks wait for its exchanges

    def _computed_before(self, plan: StepPlan) -> None:
        """Announce what earlier steps have computed of a push that starts now: all its layers are in the cache."""
        if self._exchanging is not None:
            self._exchanging.prepare(plan)
        self._announce(_Layers(plan, len(self._layers)))

    def _announce(self, current: _Layers) -> None:
        """Announce all layers of a step that have not been announced, and its end."""
        for index in sorted(current.missing):
            self._mark(current, index)
        final = tuple(push.name for push in current.plan.final)
        self._put(Sealed(current.plan.number, final, self._clock()))

    def _by_hook(self) -> dict[str, list[int]]:
        """Return, by the name with which a hook fires, the layers that are complete then."""
        complete: dict[str, list[int]] = {}
        for name, index in self._layers.items():
            complete.setdefault(attention_of(name) or name, []).append(index)
        return complete

    def _mark(self, current: _Layers, index: int, event: Event | None = None) -> None:
        plan = current.plan
        current.missing.discard(index)
        if not (plan.direct or plan.exchanges):
            return  # its tokens leave with a later step, or with none
        event = event or self._record()
        if trace.enabled():
            facts = {"step": plan.number, "layer": index, "of": len(self._layers), "title": self._titles[index]}
            trace.emit("layer_computed", **facts)
        if plan.direct:
            self._put(Computed(plan, index, event))
        if self._exchanging is None or not plan.exchanges:
            return
        current.events[index] = event
        while (ready := current.events.pop(current.next, None)) is not None:
            for exchange in plan.exchanges:
                if current.next in exchange.layers:
                    run = Run(Unit(plan.number, current.next, exchange.number), exchange, first=not current.exchanged)
                    self._exchanging.make(run, ready)
                    current.exchanged = True
            current.next += 1
