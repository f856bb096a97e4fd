# SPDX-License-Identifier: Apache-2.0
"""torchvision without its compiled part, for tests: its wheels in the package index are for CUDA, and without two names of operators its
Python, which pictures are resized by, is not imported."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

NAMED_IN = "torchvision._meta_registrations"


class _WithNames(importlib.abc.MetaPathFinder):
    library: Any = None  # gone, its operators are gone

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname != NAMED_IN:
            return
        sys.meta_path.remove(self)
        import torch

        self.library = _WithNames.library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _WithNames())
