# SPDX-License-Identifier: Apache-2.0
"""Waits for events that the package leaves out on order, so that a test can show that they are needed.

done    what the host asks an event before it pushes a layer, or lets P write into D's blocks
hold    what makes the side stream of an exchange wait for the model's stream
"""

from __future__ import annotations


def plant(forgotten: str) -> None:
    if not forgotten:
        return
    from vllm_ascend_pd.device.npu import _StreamEvent

    if forgotten == "done":
        _StreamEvent.done = lambda self: True  # type: ignore[method-assign]
    elif forgotten == "hold":
        _StreamEvent.hold = lambda self, stream: None  # type: ignore[method-assign]
    else:
        raise ValueError(f"ASCEND_HOST_FORGETS={forgotten}: done or hold is wanted")
