# SPDX-License-Identifier: Apache-2.0
"""Engine cores and workers forked from the server's process, which has already imported torch and vLLM.

For tests: vLLM spawns them on its CPU platform, where each process repeats the imports, two thirds of a start. On other
platforms vLLM forks by itself. On all of them it looks at a model's class in an interpreter of its own, once for each
class and home directory, which repeats them too. Engines of the start scripts, the quickstart and the benchmarks are
started as vLLM does it.
"""

from __future__ import annotations

import os
import socket
import stat
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def install() -> None:
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    registry._run_in_subprocess = in_a_child

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__
    if hasattr(original, "before"):
        return

    def and_fork(cls: Any, config: Any) -> None:
        original(cls, config)
        os.environ[METHOD] = "fork"

    and_fork.before = original  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(and_fork)
    os.register_at_fork(after_in_child=close_listeners)


def in_a_child(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked child. One that fails prints why, and is an EOFError here."""
    answers, theirs = Pipe(duplex=False)
    if (child := os.fork()) == 0:
        try:
            theirs.send(function())
        except Exception:  # noqa: BLE001 (the parent sees that there is no answer)
            traceback.print_exc()
        finally:
            os._exit(0)
    theirs.close()
    try:
        return answers.recv()
    finally:
        answers.close()
        os.waitpid(child, 0)


def close_listeners() -> None:
    """Close the server's listening sockets: its port must be refused as soon as its process is gone."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and duplicate.family in (socket.AF_INET, socket.AF_INET6):
                    os.close(fd)
        except OSError:
            continue  # the descriptor of the listing itself
