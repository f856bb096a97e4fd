# SPDX-License-Identifier: Apache-2.0
"""The plug-in's references, the native tests' builder and the integration tests' pair on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE / "plugin", HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
