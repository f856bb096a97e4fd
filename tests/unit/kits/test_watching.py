# SPDX-License-Identifier: Apache-2.0
"""A deadline of a test is of its own time: beside others that take its processor it comes later."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from unit.kits.watching import until


def test_time_without_a_processor_is_no_part_of_a_deadline() -> None:
    everywhere = os.sched_getaffinity(0)
    one = min(everywhere)
    others = [subprocess.Popen(["taskset", "-c", str(one), sys.executable, "-c", "while True: pass"]) for _ in range(3)]

    def works() -> bool:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.005:
            pass
        return False

    try:
        os.sched_setaffinity(0, {one})
        worked = time.thread_time()
        with pytest.raises(AssertionError, match=r"not reached within 0\.5 s"):
            until(works, seconds=0.5)
        assert time.thread_time() - worked > 0.3  # of 0.5 s of the wall it has a quarter
    finally:
        os.sched_setaffinity(0, everywhere)
        for other in others:
            other.kill()
            other.wait()
