# SPDX-License-Identifier: Apache-2.0
"""This package's connector with a record of the model runner's calls.

`kv_connector` is "Recorder", its module path is this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch_npu

from vllm_ascend_pd.connector import AscendPushConnector

CALLS: list[tuple[str, str]] = []  # hook and layer
CACHES: dict[str, list[dict[str, Any]]] = {}


class Recorder(AscendPushConnector):
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        for name, tensors in kv_caches.items():
            CACHES[name] = [_facts(tensor) for tensor in tensors]
        super().register_kv_caches(kv_caches)

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        CALLS.append(("written", layer_name))
        super().on_kv_cache_written(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        same = [tensor.data_ptr() for tensor in kv_layer] == [facts["address"] for facts in CACHES.get(layer_name, ())]
        CALLS.append(("saved" if same else "saved others", layer_name))
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        CALLS.append(("over", ""))
        super().wait_for_save()


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "contiguous": tensor.is_contiguous(),
        "format": int(torch_npu.get_npu_format(tensor)),
        "address": tensor.data_ptr(),
        "device": tensor.device.index - torch.npu.current_device(),
    }
