# SPDX-License-Identifier: Apache-2.0
"""Plug-in of pytest (`-p pd_in_nixls_place`): vLLM's connector tests get this package's connector instead of NIXL's.

The variable PD_ROLE has its kv_role. It also stands in for the mock connectors of the scheduler's tests and of the
handshake's test. Imitated is only what comes before a connector: one worker's cache, and on D, instead of NIXL's
fields, a ticket whose metaserver never answers. Scheduler and connector are unchanged.
"""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import msgspec
from unit.admission.vllm_configs import cache_config, vllm_config
from unit.geometry.kit import geometry
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_ascend_pd.connector import AscendPushConnector, Handshake
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient
from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.geometry.layout import ALL, STATE, CacheGeometry, Group
from vllm_ascend_pd.protocol.identity import Endpoint

METASERVER = "http://127.0.0.1:9"  # nothing listens there
ROLES: dict[str, dict[str, Any]] = {
    "kv_producer": {"hold_sources": 64, "hold_share": 1.0},
    "kv_consumer": {"metaserver_urls": [METASERVER], "first_token": "off"},  # none would come without a metaserver
}
ROLE = os.environ["PD_ROLE"]


def _cache(kv_cache_config: Any) -> CacheGeometry:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    groups = tuple(Group(spec.block_size, STATE if isinstance(spec, MambaSpec) else ALL) for spec in specs)
    plain = geometry("token", heads=1, tp=1, block=specs[0].block_size)
    return msgspec.structs.replace(plain, groups=groups) if len(groups) > 1 else plain


class InNixlsPlace(AscendPushConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        config = copy.copy(vllm_config)
        transfer = config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
        transfer.kv_role = ROLE
        transfer.kv_connector_extra_config = {**ROLES[ROLE], "patient": False}
        super().__init__(config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            facts = WorkerFacts(Endpoint("127.0.0.1", 9), _cache(kv_cache_config))
            self.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(facts)})

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and "metaserver" not in params:
            ticket = {"metaserver": METASERVER, "ticket": request.request_id}
            request.kv_transfer_params = {"do_remote_prefill": True, **ticket}
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


def _send_nothing(self: MetaserverClient, *_: object, **__: object) -> None:
    """Take the place of the reservation's request, so that no answer comes."""


class InTheMocksPlace(InNixlsPlace):
    """This connector for the scheduler's tests. If the test's mock has tokens for every request, each gets a ticket."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        self._tickets = bool(vllm_config.kv_transfer_config.get_from_extra_config("matched_tokens", 0))
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._tickets and ROLE == "kv_consumer" and request.kv_transfer_params is None:
            request.kv_transfer_params = {"do_remote_prefill": True}
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class ByStage(InNixlsPlace):
    """This connector for the handshake's test, which makes one without arguments and reads the metadata that it got."""

    def __init__(self) -> None:
        super().__init__(vllm_config(ROLE), KVConnectorRole.SCHEDULER, cache_config())
        self.legacy_metadata: Any = None
        self.pp_aware_metadata: Any = None

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self.legacy_metadata = metadata
        super().set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        self.pp_aware_metadata = metadata


_numbers = itertools.count()


def _of_the_next_stage() -> Handshake:
    """Return the facts of a worker with a layer of its own, in the place of a test's empty metadata."""
    layers = msgspec.structs.replace(geometry("token", heads=1, tp=1, block=16), stages=((f"l.{next(_numbers)}",),))
    return Handshake(WorkerFacts(Endpoint("127.0.0.1", 9), layers))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put this connector in the place of the connectors that the tests define or register themselves."""
    for module in {item.module for item in items}:
        if module.__name__.startswith("tests.v1.core."):
            for name in ("MockKVConnector", "ExampleConnector"):
                KVConnectorFactory._registry[name] = lambda: InTheMocksPlace
        if hasattr(module, "_PPAwareConnector"):
            module._PPAwareConnector, module._Metadata = ByStage, _of_the_next_stage


MetaserverClient.reserve = _send_nothing  # type: ignore[method-assign]
KVConnectorFactory._registry["NixlConnector"] = lambda: InNixlsPlace
