# SPDX-License-Identifier: Apache-2.0
"""Probes of every instance, each on its own schedule: often of its health, less often of the models that it serves."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from vllm_ascend_pd.router import models
from vllm_ascend_pd.router.core.decisions import CircuitState, Evidence
from vllm_ascend_pd.router.fleet import NAMED, Fleet, Instance
from vllm_ascend_pd.router.instance_tasks import attend_each
from vllm_ascend_pd.router.keys import bearer
from vllm_ascend_pd.router.relay import OWN_MARK
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.router.upstream import Upstream
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError

log = logging.getLogger(__name__)
MODELS_EVERY_S = 10.0  # adapters come and go while an engine runs
_MODELS_BYTES = 1 << 20


class Prober:
    def __init__(self, settings: Settings, fleet: Fleet, upstream: Upstream) -> None:
        self._settings = settings
        self._fleet = fleet
        self._upstream = upstream

    async def run(self) -> None:
        """Probe all instances, without end. Each has its own task, so that a slow one delays no other."""
        await attend_each(self._fleet, "probe", self._watch)

    async def _watch(self, instance: Instance) -> None:
        asked, refused = 0.0, 0.0
        while True:
            await self.probe(instance)
            if instance.history.refused > refused:  # another process by now, perhaps with another model
                asked, refused = 0.0, instance.history.refused
            if instance.healthy and (not asked or time.monotonic() >= asked + MODELS_EVERY_S):
                asked = time.monotonic()
                await self._models(instance)
            await asyncio.sleep(self._settings.probe_every_s * (0.8 + 0.4 * random.random()))

    async def probe(self, instance: Instance) -> None:
        try:
            timeout = self._settings.probe_timeout_s
            async with self._upstream.ask(instance.origin, "GET", b"/health", [], b"", timeout) as reply:
                await reply.rest(1 << 16, timeout)
        except UpstreamError as problem:
            if problem.failure is HttpFailure.OURS:
                if instance.last_error != problem.why:  # once, not with each probe
                    log.warning("%s is not probed: %s", instance.name, problem.why)
                instance.last_error, instance.last_error_at = problem.why, time.time()
                return
            self._fleet.record(instance, Evidence.PROBE_FAILED, f"/health: {problem.why}")
            if isinstance(problem.__cause__, (ConnectionRefusedError, ConnectionResetError)):
                instance.history = instance.history.refuses(time.monotonic())
            if isinstance(problem.__cause__, ConnectionRefusedError):
                # An engine that shuts down may keep the connection of a request that it will never answer.
                self._upstream.suspect(instance.origin, self._settings.refusing_s)
            elif instance.circuit.state is CircuitState.UNREACHABLE:
                # The engine or its host is frozen: its connections would never be closed.
                self._upstream.suspect(instance.origin, self._settings.unreachable_s)
            return
        self._upstream.trust_again(instance.origin)
        if any(name == OWN_MARK for name, _ in reply.headers):
            self._fleet.record(instance, Evidence.PROBE_FAILED, "a metaserver answers there, no engine")
        elif reply.status == 200:
            # Learn its models before it takes requests, so that it gets none for another engine's model.
            unheard = await self._models(instance) if instance.cards is None else ""
            evidence = Evidence.PROBE_FAILED if unheard else Evidence.PROBE_OK
            self._fleet.record(instance, evidence, unheard)
        else:
            self._fleet.record(instance, Evidence.PROBE_FAILED, f"/health answered {reply.status}")

    async def _models(self, instance: Instance) -> str:
        """Learn an instance's models; return why it did not answer, or nothing. An empty list leaves the last one."""
        timeout = self._settings.probe_timeout_s
        # Whoever reaches a sidecar can name a process of its own: such a P must not get the key by being probed.
        headers = bearer(self._settings.engine_token) if instance.source != NAMED else []
        try:
            asking = self._upstream.ask(instance.origin, "GET", models.ROUTE.encode(), headers, b"", timeout)
            async with asking as reply:
                body = await reply.rest(_MODELS_BYTES, timeout)
        except UpstreamError as failed:
            return f"{models.ROUTE}: {failed.why}"
        cards = models.cards_of(body) if reply.status == 200 else {}
        self._fleet.set_models(instance, cards or instance.cards or {})
        return ""
