# SPDX-License-Identifier: Apache-2.0
"""Asks every instance for its health, all the time."""

from __future__ import annotations

import asyncio

from vllm_ascend_pd.metaserver.decisions import Evidence
from vllm_ascend_pd.metaserver.service.fleet import Fleet, Instance
from vllm_ascend_pd.metaserver.service.settings import Settings
from vllm_ascend_pd.metaserver.service.upstream import Upstream, UpstreamError


class Prober:
    def __init__(self, settings: Settings, fleet: Fleet, upstream: Upstream) -> None:
        self._settings = settings
        self._fleet = fleet
        self._upstream = upstream

    async def run(self) -> None:
        while True:
            await asyncio.gather(*(self.probe(instance) for instance in self._fleet))
            await asyncio.sleep(self._settings.probe_every_s)

    async def probe(self, instance: Instance) -> None:
        try:
            reply = await self._upstream.send("GET", instance.base + "/health", [], b"", self._settings.probe_timeout_s)
            try:
                await reply.rest(1 << 16, self._settings.probe_timeout_s)
            finally:
                reply.close()
        except UpstreamError as problem:
            self._fleet.seen(instance, Evidence.PROBE_FAILED, problem.why)
            return
        if reply.status == 200:
            self._fleet.seen(instance, Evidence.PROBE_OK)
        else:
            self._fleet.seen(instance, Evidence.PROBE_FAILED, f"/health answered {reply.status}")
