# SPDX-License-Identifier: Apache-2.0
"""Streams of all kinds through a P and several real D's, one of which is killed in each round; their blocks run out.

Greedy answers are compared with one engine's; of the others the parser, the grammar or the schema takes the whole.
Prints after each round how many streams were resumed and the longest gaps that their clients saw. Fails if an answer
differs or is broken.
"""

from __future__ import annotations

import argparse
import sys

from tools.support.cluster import Cluster, fresh_directory, say
from tools.support.fork_server import ForkServers
from tools.support.from_tests import dropping_engines
from tools.support.resuming import MakeSpecs, run_all, vllm_on_cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="number of streams (default: 1000)")
    parser.add_argument(
        "--at-once", type=int, default=48, help="streams per round, with one killed D; 90 at most (default: 48)"
    )
    parser.add_argument(
        "--decodes", type=int, default=2, help="number of D's; more than two shorten the waits (default: 2)"
    )
    parser.add_argument(
        "--d-tp", type=int, nargs="+", default=[1], metavar="TP", help="TP of the D's, in turn (default: 1)"
    )
    parser.add_argument("--model", default="gqa", help="a small model of tools/support/models.py (default: gqa)")
    parser.add_argument("--seed", type=int, default=1, help="seed of prompts and kills (default: 1)")
    parser.add_argument(
        "--vllm-ascend",
        action="store_true",
        help="vllm-ascend's engines in host memory, whose D's drop requests too; GQA, TP 1 (tests/ascend_host)",
    )
    args = parser.parse_args()
    if not args.vllm_ascend:
        return run(args, vllm_on_cpu(args.decodes, args.model, args.d_tp))
    if args.model != "gqa" or args.d_tp != [1]:
        parser.error("--vllm-ascend has one model and one size: leave --model and --d-tp out")
    with dropping_engines(args.decodes) as (make, length, forks):
        return run(args, make, length, forks)


def run(args: argparse.Namespace, make: MakeSpecs, length: int = 150, forks: ForkServers | None = None) -> int:
    """Run all rounds with the engines that `make` specifies. Return the exit code."""
    with Cluster(fresh_directory("resume"), forks=forks) as cluster:
        report = run_all(cluster, args.seed, say, make, args.streams, args.at_once, length)
    for line in (*report.problems, *cluster.leaks):
        say(line[:3000])
    return 1 if report.problems or cluster.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
