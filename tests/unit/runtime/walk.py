# SPDX-License-Identifier: Apache-2.0
"""The way of a prompt's last layer from P's hook to the report of D's worker: how many functions in how many files.

    PYTHONPATH=.:tests .venv/bin/python -m unit.runtime.walk [--lost] [--functions]

With --lost the write of that layer is lost, and the way begins there; it ends with the report of that.

One P, one D, the in-process transfer engine, no checksums, and prompts before this one. The functions of the package
are counted that any thread calls; comprehensions are not. Which thread comes first, and whether it then finds something
to do, differs from run to run: the middle one of nine runs is printed.
"""

from __future__ import annotations

import sys
from typing import Any

from unit.device.caches import CacheModel
from unit.kits.walk import Walk, show
from unit.kits.watching import running, until
from unit.runtime.sites import UNTOUCHED, DecodeSite, PrefillSite, SitePrompt, config
from vllm_ascend_pd.metadata import LoadEnd
from vllm_ascend_pd.prefill.worker.role import PrefillWorker
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write

RUNS = 9


class LosingWire(MemoryTransport):
    """Wire on which the writes of a walk are lost."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = walk

    def land(self, write: Write) -> WriteState:
        state = super().land(write)
        if not self.walk.on:
            return state
        self.walk.begin()
        return WriteState.FAILED


def push(p: PrefillSite, d: DecodeSite, name: str, walk: Walk) -> str:
    """Push a prompt; `walk` begins with the hook of its last layer. Return the code with which it ends."""
    request, last = d.bound(name, 16), p.stages[0][-1]

    def hook(worker: PrefillWorker, layer: str, _: Any) -> None:
        if layer == last:
            until(lambda: came(d, request, len(p.stages[0]) - 1) and not p.runtime.writer.busy, "the layers before it")
            walk.begin()
        worker.save_layer(layer)

    p.prefill(request, hook=hook)
    reports: list[LoadEnd] = []

    def reported() -> bool:
        reports.extend(d.workers[0].reports())
        return bool(reports)

    until(reported, "the report")
    walk.on = False
    d.outcomes[name] = reports
    d.collect()
    p.finish_and_free(request)
    return reports[0].why.code


def came(d: DecodeSite, request: SitePrompt, layers: int) -> bool:
    views = d.ranks[0].views[:layers]
    return all((view[request.d_blocks] != UNTOUCHED).any() for regions in views for view in regions)


def main() -> None:
    runs: list[tuple[str, dict[tuple[str, int, str], int]]] = []
    model, keys = CacheModel("opaque", 2), config(verify="off", quiet_s=0.2)
    lost = "--lost" in sys.argv
    with Walk() as walk:
        walk.on = False
        wire = LosingWire(walk) if lost else MemoryTransport()
        p, d = PrefillSite(model, 1, push=keys, make_transport=lambda: wire), DecodeSite(model, 1, push=keys)
        with running(p, d):
            for run in range(RUNS + 2):
                assert push(p, d, f"prompt {run}", walk) == ("PD-XFER-003" if lost else "")
                runs.append((str(walk), walk.calls))
    figures, calls = sorted(runs[2:], key=lambda run: (len(run[1]), sum(run[1].values())))[RUNS // 2]
    show(figures, calls)


if __name__ == "__main__":
    main()
