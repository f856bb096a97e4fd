# SPDX-License-Identifier: Apache-2.0
"""vLLM's own KVOutputAggregator over the reports of four prefill and two decode workers (MLA, TP 4 to 2)."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from unit.device.caches import CacheModel
from unit.kits.watching import running, until
from unit.runtime.sites import DecodeSite, MakeTransport, PrefillSite, config
from vllm_ascend_pd.decode.scheduler.core.book import OPEN
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write

MLA = CacheModel("latent", heads=1)


def output(kv: KVConnectorOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[], kv_connector_output=kv)


class AggregatedPrefill(PrefillSite):
    """Pass reports through the aggregator, and collect the requests that it reports as sent."""

    def __init__(self, make_transport: MakeTransport = MemoryTransport) -> None:
        self.aggregator = KVOutputAggregator(4)
        self.completed: list[str] = []
        super().__init__(MLA, 4, push=config(quiet_s=0.3), make_transport=make_transport)

    def collect(self) -> None:
        ended, self.ended = self.ended, []
        outputs = [output(KVConnectorOutput(finished_sending=set(w.ended(ended).sent))) for w in self.workers.values()]
        combined = self.aggregator.aggregate(outputs)
        assert combined is not None and combined.kv_connector_output is not None
        for name in combined.kv_connector_output.finished_sending or ():
            self.completed.append(name)
            if self.book.released(name):
                self.released.add(name)


class AggregatedDecode(DecodeSite):
    """D whose workers' reports pass through the aggregator, with the requests that it reports as received or failed."""

    def __init__(self) -> None:
        self.aggregator = KVOutputAggregator(2)
        self.completed: list[str] = []
        self.failed: list[str] = []
        super().__init__(MLA, 2, push=config(quiet_s=0.3))

    def collect(self) -> None:
        outputs = []
        for worker in self.workers:
            reports = worker.reports()
            failed = {report.request_id for report in reports if not report.ok}
            kv = KVConnectorOutput(finished_recving={r.request_id for r in reports}, failed_recving=failed)
            outputs.append(output(kv))
        combined = self.aggregator.aggregate(outputs)
        assert combined is not None and combined.kv_connector_output is not None
        self.failed += combined.kv_connector_output.failed_recving
        for name in combined.kv_connector_output.finished_recving or ():
            self.completed.append(name)
            assert self.book.received(0.0, name) is not None


def test_each_id_is_completed_once_and_prefills_blocks_are_freed() -> None:
    p, d = AggregatedPrefill(), AggregatedDecode()
    with running(p, d):
        requests = [d.reserve(f"r{i}", 10 + 7 * i) for i in range(4)]
        for request in requests:
            d.step()
            p.prefill(request, 6, request.tokens - 6)
            assert p.finish(request)
        names = [request.name for request in requests]
        until(lambda: d.step() and len(d.completed) >= len(names), "all loads")
        until(lambda: p.idle() and len(p.completed) >= len(names), "all pushes")
        for _ in range(20):  # a second completion of an id would show
            d.step()
            p.idle()
        assert sorted(d.completed) == sorted(names) and not d.failed
        assert sorted(p.completed) == sorted(request.p_name for request in requests)
        assert p.released == set(p.completed) and p.book.open_count() == 0 and d.book.count(*OPEN) == 0
        d.check(*requests)


def test_a_failure_on_one_of_four_workers_of_prefill_fails_the_request() -> None:
    made: list[MemoryTransport] = []

    class BadThirdWorker(MemoryTransport):
        def land(self, write: Write) -> WriteState:
            return WriteState.FAILED if self is made[2] else super().land(write)

    def make() -> MemoryTransport:
        made.append(BadThirdWorker())
        return made[-1]

    p, d = AggregatedPrefill(make), AggregatedDecode()
    with running(p, d):
        request = d.bound("r", 31)
        p.prefill(request)
        assert p.finish(request)
        until(lambda: d.step() and d.completed, "the load")
        until(lambda: p.idle() and p.completed, "the push")
        assert d.completed == ["r"] and d.failed == ["r"], "one rank had all its KV, and yet the request fails"
        assert p.completed == [request.p_name] and p.released == {request.p_name}
