# SPDX-License-Identifier: Apache-2.0
"""`verify: full`: checksums of every pushed block, end to end."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_ascend_pd.decode.decisions import Bind
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.push import Claim, Sender
from vllm_ascend_pd.runtime.work import PushWork


class Summer:
    def __init__(self, caches: Caches, device: Device, rank: int) -> None:
        raise NotImplementedError

    def add(self, sender: Sender, claim: Claim, work: PushWork) -> None:
        raise NotImplementedError


class Verifier:
    def __init__(self, caches: Caches, device: Device, rank: int) -> None:
        raise NotImplementedError

    def expect(self, bind: Bind) -> None:
        raise NotImplementedError

    def first_difference(self, transfer: TransferId, sums: Mapping[str, int]) -> str | None:
        raise NotImplementedError

    def forget(self, transfer: TransferId) -> None:
        raise NotImplementedError
