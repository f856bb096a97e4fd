# SPDX-License-Identifier: Apache-2.0
"""torchvision without its compiled part, for tests.

The wheels in the package index are for CUDA. Without them torchvision's Python, which resizes pictures, still needs two
operator names to be importable.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

NAMED_IN = "torchvision._meta_registrations"


class _WithNames(importlib.abc.MetaPathFinder):
    library: Any = None  # keeps the library alive, and its operators with it

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname != NAMED_IN:
            return
        sys.meta_path.remove(self)
        import torch

        self.library = _WithNames.library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _WithNames())
