# SPDX-License-Identifier: Apache-2.0
"""Random pauses in the package's threads, as on a machine with other load.

`pytest --stagger SEED` finds tests that pass only while answers come in the usual order. At random calls and returns in
the package's own code a thread sleeps for some milliseconds. A test's own thread does not pause, so reading a result
too early shows.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[1] / "vllm_ascend_pd")
SHARE = 0.001  # of all calls and returns
LONGEST_S = 0.05


def start(seed: int) -> None:
    """Pause in every thread that starts from now on."""
    per_thread = threading.local()

    def called(frame: FrameType, event: str, _: Any) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE) or event not in ("call", "return"):
            return
        if not hasattr(per_thread, "chance"):
            per_thread.chance = random.Random(f"{seed} {threading.current_thread().name}")
        if per_thread.chance.random() < SHARE:
            time.sleep(per_thread.chance.random() * LONGEST_S)

    threading.setprofile(called)
