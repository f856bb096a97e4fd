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
from tools.support.resuming import MAX_AT_ONCE, Resuming


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
    args = parser.parse_args()
    with Cluster(fresh_directory("resume")) as cluster:
        run = Resuming(cluster, args.seed, say, args.decodes, args.model, args.d_tp)
        try:
            while run.report.streams < args.streams:
                run.round(min(args.at_once, MAX_AT_ONCE, args.streams - run.report.streams))
        finally:
            run.close()
    for line in (*run.report.wrong, *run.report.broken, *cluster.leaks):
        say(line[:1000])
    say(f"resume: {'bad' if run.report.wrong or run.report.broken or cluster.leaks else 'good'}, {run.report}")
    return 1 if run.report.wrong or run.report.broken or cluster.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
