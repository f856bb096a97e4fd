# SPDX-License-Identifier: Apache-2.0
"""The state of one worker as plain data, and the sum over the workers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

from vllm_ascend_pd import __version__
from vllm_ascend_pd.router.canary import Canary
from vllm_ascend_pd.router.core.decisions import Condition, Role
from vllm_ascend_pd.router.front import Front

# The worst state that any worker sees comes first.
_WORST = [c.value for c in (Condition.DRAINING, Condition.DOWN, Condition.SUSPECT, Condition.STARTING, Condition.READY)]
_IN_FLIGHT_SHOWN = 200
_SUMMED = ("tokens_in_flight", "requests", "served", "broke")


def worker_report(worker: int, front: Front, canary: Canary, file_problem: str, details: bool) -> dict[str, Any]:
    """Return this worker's report. `details`: with the requests in progress, the last ones, and recent troubles."""
    report: dict[str, Any] = {
        "worker": worker,
        "url": front.own_url,
        "deployment": front.settings.deployment,
        "ready": canary.ready(),
        "proven": canary.proven(),
        "proofs": [astuple(proof) for proof in front.fleet.proven()],
        "histories": {instance.name: instance.history.as_sent() for instance in front.fleet},
        "canary_error": canary.last_error,
        "file_error": file_problem,
        "closing": front.closing,
        "prefills": front.fleet.serves(Role.PREFILL) or front.settings.sidecar,
        "running": front.turnstile.keeper.running,
        "waiting": front.turnstile.keeper.waiting,
        "instances": [instance.facts() for instance in front.fleet],
    }
    if details:
        newest = sorted(front.journal.exchanges, key=lambda e: e.started)[-_IN_FLIGHT_SHOWN:]
        report["in_flight"] = [exchange.facts() for exchange in newest]
        report["last"] = [exchange.facts() for exchange in front.journal.last]
        report["errors"] = list(front.journal.troubles)
    return report


def sum_of(reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum. The first report is the asked worker's own: membership and what is proven are taken from it."""
    mine, *others = reports
    everyone = [mine, *others]
    instances = [dict(facts) for facts in mine["instances"]]
    for facts in instances:
        elsewhere = [i for report in others for i in report["instances"] if i["name"] == facts["name"]]
        for key in _SUMMED:
            facts[key] += sum(i[key] for i in elsewhere)
        facts["state"] = min((i["state"] for i in (facts, *elsewhere)), key=_WORST.index)
        latest = max((facts, *elsewhere), key=lambda i: i["last_error_at"])
        facts["last_error"], facts["last_error_at"] = latest["last_error"], latest["last_error_at"]
    return {
        "now": time.time(),
        "version": __version__,
        "deployment": mine["deployment"],
        "ready": mine["ready"],
        "prefills": mine["prefills"],
        "proven": mine["proven"],
        "canary_error": mine["canary_error"],
        "file_error": mine["file_error"],
        "running": sum(r["running"] for r in everyone),
        "waiting": sum(r["waiting"] for r in everyone),
        "workers": [{"worker": r["worker"], "url": r["url"], "running": r["running"]} for r in everyone],
        "instances": instances,
        "in_flight": [e for r in everyone for e in r.get("in_flight", ())],
        "errors": sorted((e for r in everyone for e in r.get("errors", ())), key=lambda e: float(e["at"]))[-50:],
        "last": sorted((e for r in everyone for e in r.get("last", ())), key=lambda e: float(e["started"]))[-100:],
    }
