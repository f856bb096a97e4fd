# SPDX-License-Identifier: Apache-2.0
"""Import path of the unit tests, whose references the native tests use."""

from __future__ import annotations

import sys
from pathlib import Path

UNIT = Path(__file__).resolve().parents[1] / "unit"
if str(UNIT) not in sys.path:
    sys.path.insert(0, str(UNIT))
