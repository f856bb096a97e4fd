# SPDX-License-Identifier: Apache-2.0
"""Streams of all kinds through a P and two D's of vllm-ascend, one of which is killed in each round; blocks run out.

    scripts/resume.sh --vllm-ascend [--streams N] [--at-once N] [--decodes N] [--seed S]

Where blocks run out its recompute scheduler drops a request, which goes on with another D or with the same one.
Otherwise as tools/resume.py, of which this is the other half: the engines are those of engine_sets.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "plugin"), str(HERE.parent / "integration")]

from engine_sets import Engines, Machine, Side, additional, few_blocks  # noqa: E402
from host_build import HostBuild  # noqa: E402
from pairs import engine_forks  # noqa: E402

from tools.resume import options, run  # noqa: E402
from tools.support.cluster import Cluster, fresh_directory  # noqa: E402
from tools.support.resuming import MakeSpecs, spoken  # noqa: E402
from tools.support.spec import EngineSpec  # noqa: E402

LENGTH = 225  # of a prompt: two blocks of 128, and most answers need a third
FEW = (*few_blocks(17), *additional(recompute_scheduler_enable=True))
# Else vLLM 0.30 by itself, on either side and without this package, lets the places of an answer be counted wrong by
# what counts them (min_tokens, the tests' scripts) in a batch whose requests have changed.
IN_TURN = ("--no-async-scheduling",)


def vllm_ascend(machine: Machine, decodes: int = 2) -> MakeSpecs:
    """Return what makes specifications of vllm-ascend's engines, D's with few blocks and its recompute scheduler."""

    def make(cluster: Cluster, url: str) -> list[EngineSpec]:
        sets = [Engines(f"resume {i}", d=Side(flags=FEW), flags=IN_TURN, verify="off") for i in range(decodes)]
        pairs = [one.specs(machine, cluster, url) for one in sets]
        return [spoken(spec, cluster) for spec in (pairs[0][0], *(d for _, d in pairs))]

    return make


def main() -> int:
    parser = options()
    parser.description = __doc__
    args = parser.parse_args()
    with engine_forks(fresh_directory("forks")) as forks:
        return run(args, vllm_ascend(Machine.host(HostBuild.of(), forks), args.decodes), LENGTH, forks)


if __name__ == "__main__":
    sys.exit(main())
