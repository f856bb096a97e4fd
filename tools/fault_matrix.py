# SPDX-License-Identifier: Apache-2.0
"""Real faults in a real pair: 27 cells, nine stages of a request × prefill, decode, metaserver.

With --order the cells behind vLLM's own routers, in their orders, each role killed at each stage. With --stops each
process of P and D is stopped for some time instead, beside clients that stream.

Each cell sends three requests. When the first one reaches the stage, one role is killed, stopped or made to refuse.
Checked are: right tokens or a clear error in time, no other process dies, the survivors' blocks are free again, and the
pair serves new requests at once, a killed role having been restarted on its address.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from itertools import product

from tools.support.cells import (
    CELLS,
    LIMIT_S,
    ORDERS,
    ROUTED,
    TIMERS,
    CellResult,
    CellRun,
    FaultCell,
    FaultSite,
    exchanges,
    make_site,
    start_pair,
    start_routed,
    table,
)
from tools.support.cluster import Cluster, fresh_directory, say
from tools.support.compare import TIE, AnswerTally
from tools.support.stops import DEADLINES, PROCESSES, StopResult, Stops, stop_table


def arguments() -> argparse.Namespace:
    names = [cell.name for cell in (*CELLS, *ROUTED)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cell", action="append", choices=names, metavar="CELL", help=f"one of {' '.join(names)}, repeatable"
    )
    by_name = [order.name.replace(" ", "-") for order in ORDERS]
    parser.add_argument(
        "--order", choices=by_name, default=by_name[0], help=f"order of the router (default: {by_name[0]})"
    )
    parser.add_argument("--stages", default="1-9", help="only these stages: 3, or 1-4")
    parser.add_argument(
        "--p-tp", type=int, default=2, help="tensor parallel size of prefill (default: 2; decode has 1)"
    )
    parser.add_argument(
        "--regroup",
        choices=("never", "auto", "always"),
        default="auto",
        help="of prefill: always, so that each push needs exchanges between its ranks (default: auto, which on CPU has none)",
    )
    parser.add_argument(
        "--stops",
        type=float,
        nargs="+",
        metavar="SECONDS",
        help="in place of the cells: SIGSTOP of each process of P and D in turn, for so long, beside clients that stream",
    )
    parser.add_argument("--list", action="store_true", help="print the cells and exit")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[FaultCell]:
    first, _, last = args.stages.partition("-")
    stages = range(int(first), int(last or first) + 1)
    cells = [cell for cell in (*CELLS, *ROUTED) if cell.order.name.replace(" ", "-") == args.order]
    return [cell for cell in cells if cell.stage in stages and (not args.cell or cell.name in args.cell)]


def start(args: argparse.Namespace, cluster: Cluster, tally: AnswerTally) -> FaultSite:
    order = next(order for order in ORDERS if order.name.replace(" ", "-") == args.order)
    if order.router is not None:
        return start_routed(cluster, "matrix", args.p_tp, order, tally, args.regroup)
    port = cluster.port()
    pair = ("matrix", args.p_tp, [f"http://127.0.0.1:{port}"])
    return make_site(cluster, *start_pair(cluster, *pair, regroup=args.regroup), port, tally)


def stops(args: argparse.Namespace) -> int:
    rows: list[StopResult] = []
    failed: list[str] = []
    tally, begun = AnswerTally(limit=TIE), time.monotonic()
    with Cluster(fresh_directory("fault-matrix")) as cluster:
        port = cluster.port()
        pair = start_pair(cluster, "stops", args.p_tp, [f"http://127.0.0.1:{port}"], regroup=args.regroup)
        site = make_site(cluster, *pair, port, tally, DEADLINES)
        run = Stops(site)
        for seconds, role, process in product(args.stops, "PD", PROCESSES):
            try:
                rows.append(run(role, process, seconds))
                say(f"[{time.monotonic() - begun:4.0f} s] {stop_table(rows)[-1]}")
            except (AssertionError, TimeoutError, RuntimeError, OSError) as broken:
                failed.append(f"{process} of {role} for {seconds:g} s: {broken}")
                say(f"    FAILED: {failed[-1]}")
                traceback.print_exc()
    for line in ["", *stop_table(rows), "", f"{len(rows)} stops good, {tally.summary()}"]:
        say(line)
    for line in [*failed, *cluster.leaks]:
        say(f"FAILED: {line}")
    return 1 if failed or cluster.leaks else 0


def main() -> int:
    args = arguments()
    if args.stops:
        return stops(args)
    cells = chosen(args)
    if args.list:
        for cell in cells:
            say(str(cell))
        return 0
    begun = time.monotonic()
    rows: list[CellResult] = []
    failed: list[str] = []
    tally = AnswerTally()
    with Cluster(fresh_directory("fault-matrix")) as cluster:
        say(f"fault matrix: {len(cells)} cells; timers {TIMERS}; everything is over within {LIMIT_S:.0f} s of a fault")
        site = start(args, cluster, tally)
        try:
            for number, cell in enumerate(cells, 1):
                say(f"[{time.monotonic() - begun:4.0f} s] {number} of {len(cells)}: {cell}")
                try:
                    rows.append(CellRun(site, cell)())
                    say(f"    good: {rows[-1].answers}; {rows[-1].total_s:.1f} s")
                    say(f"    {table(rows)[-1]}")  # results so far, in case the run is cut short
                except (AssertionError, TimeoutError, RuntimeError, OSError) as broken:
                    failed.append(f"{cell}: {broken}")
                    say(f"    FAILED: {broken}")
                    traceback.print_exc()
                    for role, server in site.servers.items():
                        if not server.process.alive:
                            say(f"    {role} is dead; the end of its log:\n{server.process.tail()}")
                            site.replace(role)
        finally:
            site.close_front()
    made = exchanges(cluster.traces)
    if args.regroup == "always" and not made:
        failed.append("no exchange was made")
    say("")
    for line in table(rows):
        say(line)
    say("")
    stages = len({row.cell.stage for row in rows})
    order = next(order for order in ORDERS if order.name.replace(" ", "-") == args.order)
    say(
        f"{len(rows)} of {len(cells)} cells good, {stages} of {len(order.stages)} stages, {tally.summary()}, "
        f"{made} exchanges, {time.monotonic() - begun:.0f} s"
    )
    for line in [*failed, *cluster.leaks]:
        say(f"FAILED: {line}")
    return 1 if failed or cluster.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
