# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd doctor`: looks at a host before engines are started on it, and at a pair of hosts.

On one host: software against the table of known releases, ports, limits, clock, secret, and what an NPU needs. With
`--peer HOST:PORT` also the way to another host, on which `vllm-ascend-pd doctor --listen` waits: the side channel's
greeting, what differs, and 2 MiB written and checked both ways. Exit code 1 when something would not work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
from collections.abc import Iterable
from typing import Any

from vllm_ascend_pd.cli import flag_values
from vllm_ascend_pd.cli.checkup import engine, npu, running
from vllm_ascend_pd.cli.checkup import host as host_checks
from vllm_ascend_pd.cli.checkup.check import FAILURE, Check, failed, good, note
from vllm_ascend_pd.errors import ConfigError, one_line
from vllm_ascend_pd.secret_files import load_secrets
from vllm_ascend_pd.shared.exposure import check_exposure


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="checks a host, and a pair of hosts",
        description=__doc__.split("\n\n", 2)[1] if __doc__ else None,
    )
    parser.add_argument("--peer", default="", metavar="HOST:PORT", help="check the way to this doctor, or engine")
    parser.add_argument(
        "--engine", default="", metavar="URL", help="look at this running engine alone, by its /metrics"
    )
    parser.add_argument(
        "--metaserver-host", action="store_true", help="look at a host of the metaserver, without engines"
    )
    parser.add_argument("--listen", default="", metavar="HOST:PORT", nargs="?", const="127.0.0.1:9390",
                        help="answer other doctors there (%(const)s) instead of checking")  # fmt: skip
    parser.add_argument("--calls", type=int, default=0, help="with --listen: end after so many; 0: go on")
    parser.add_argument("--kv-transfer-config", default="", metavar="JSON|@FILE", help="what the engine will get")
    parser.add_argument("--secret-file", default="", help="as in the configuration")
    parser.add_argument("--host", default="", help="address that the engine will bind (VLLM_HOST_IP, else loopback)")
    parser.add_argument("--ports", nargs="+", action="extend", type=int, default=[], metavar="PORT",
                        help="ports that must be free here: the API's, the metaserver's")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1,
                        help="workers on this host: as many side channel ports (with --dp they are counted from sizes)")  # fmt: skip
    parser.add_argument("--model", metavar="DIR", default="", help="compare the caches too (give it on both sides)")
    parser.add_argument("--tp", type=int, help="tensor-parallel size of this host's engine (with --model: 1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size of this host's engine")
    parser.add_argument("--dp", type=int, metavar="SIZE",
                        help="data-parallel size of this host's engine: which ports its ranks take here, "
                             "whether they exist, and dp_size of the configuration")  # fmt: skip
    parser.add_argument("--dp-size-local", type=int, metavar="RANKS",
                        help="with --dp: data-parallel ranks on this host (all from --dp-start-rank on)")  # fmt: skip
    parser.add_argument("--dp-start-rank", type=int, default=0, metavar="RANK",
                        help="with --dp: the first of them (%(default)s)")  # fmt: skip
    parser.add_argument("--dcp", type=int, default=1, help="decode context-parallel size of this host's engine")
    parser.add_argument("--pcp", type=int, default=1, help="prefill context-parallel size of this host's engine")
    parser.add_argument("--interleave", type=int, metavar="TOKENS",
                        help="its --cp-kv-cache-interleave-size (with context parallelism: --block-size)")  # fmt: skip
    parser.add_argument(
        "--speculative-config", default="", metavar="JSON", help="what the engine will get, if anything"
    )
    parser.add_argument("--block-size", type=int, default=128, help="tokens per block of this host's engine")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32", "fp8"), help="of the cache")
    parser.add_argument("--only-configuration", action="store_true",
                        help="look at --kv-transfer-config and --model alone, as the start scripts do before a start")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the checks as one JSON document")
    return parser


def run(args: argparse.Namespace) -> int:
    options = _options(args)
    if args.listen:
        return _listen(args, options)
    checks: list[Check] = []
    for check in _all(args, options):
        checks.append(check)
        if not args.json:
            print(check.line(), flush=True)
    failed = sum(check.level == FAILURE for check in checks)
    if args.json:
        print(json.dumps({"good": not failed, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
    return 1 if failed else 0


def _all(args: argparse.Namespace, options: host_checks.HostOptions) -> Iterable[Check]:
    if args.engine:
        yield from running.checks(args.engine)
        return
    if args.metaserver_host:
        yield from host_checks.of_the_metaserver(options)
        return
    if args.model:
        yield _model(args.model)
    if args.only_configuration:
        settings = list(host_checks.settings(options))
        if options.push.channel.secret_file:
            settings.append(host_checks.secret(options))
        yield from settings
        # The engine's own rules import vLLM, which takes long.
        if not any(check.level == FAILURE for check in settings):
            yield from engine.checks(options)
        return
    yield from host_checks.checks(options)
    yield from engine.checks(options)
    yield from npu.checks(options)
    if args.peer:
        from vllm_ascend_pd.cli.checkup import pair

        yield from pair.call(_side(args, options), *_address(args.peer, "--peer"))


def _options(args: argparse.Namespace) -> host_checks.HostOptions:
    """Return the operator's input, checked. Raise ConfigError for a value that cannot be used."""
    base = host_checks.read_config(args.kv_transfer_config) if args.kv_transfer_config else host_checks.HostOptions()
    push = base.push
    if args.secret_file:
        push = dataclasses.replace(push, channel=dataclasses.replace(push.channel, secret_file=args.secret_file))
    for name in ("ranks", "tp", "pp", "dp", "dp_size_local", "dcp", "pcp", "interleave", "block_size"):
        if (value := getattr(args, name)) is not None:
            flag_values.at_least("--" + name.replace("_", "-"), value, 1)
    flag_values.at_least("--dp-start-rank", args.dp_start_rank, 0)
    flag_values.at_least("--calls", args.calls, 0)
    for number in args.ports:
        flag_values.port("--ports", number)
    host = args.host or push.channel.side_channel_host or os.environ.get("VLLM_HOST_IP", "") or "127.0.0.1"
    options = dataclasses.replace(
        base,
        push=push,
        host=flag_values.host("--host", host),
        ports=tuple(args.ports),
        ranks=args.ranks,
        tp=args.tp or 0,
        pp=args.pp,
        dp=args.dp or 0,
        dp_ranks=_dp_ranks(args),
        dcp=args.dcp,
        pcp=args.pcp,
        interleave=args.interleave or args.block_size,
        speculative=args.speculative_config,
        on_npu=npu.present(),
    )
    taken = host_checks.side_channel_ports(options)
    if taken and taken[-1] > 65535:
        flag = f"--dp {args.dp}" if args.dp else f"--ranks {args.ranks}"
        why = f"with {flag} the last rank's port would be {taken[-1]}"
        flag_values.refuse("side_channel_port", push.channel.side_channel_port, why, "Choose a lower one, or 0.")
    return options


def _dp_ranks(args: argparse.Namespace) -> range:
    """Return the data-parallel ranks on this host. Raise ConfigError if the engine does not have them."""
    if not args.dp:
        if args.dp_size_local is not None or args.dp_start_rank:
            flag, value = "--dp-size-local", args.dp_size_local
            if not value:
                flag, value = "--dp-start-rank", args.dp_start_rank
            flag_values.refuse(flag, value, "the number of all ranks is missing", "Give --dp, too.")
        return range(1)
    here = range(args.dp_start_rank, args.dp_start_rank + (args.dp_size_local or max(1, args.dp - args.dp_start_rank)))
    if here[-1] >= args.dp:
        why = f"the last rank here would be {here[-1]}, and the engine's last is {args.dp - 1}"
        flag_values.refuse("--dp-start-rank", args.dp_start_rank, why, "Ranks count from 0 over all hosts.")
    return here


def _model(model: str) -> Check:
    """Check a model's cache. What the reader cannot describe is no failure: the start scripts would stop for it."""
    from vllm_ascend_pd.cli.model import described, read_config

    try:
        config = read_config(model)
    except ConfigError as error:
        return failed("model", error)
    try:
        cache = described(model, config)
    except ConfigError as error:
        if error.code == "PD-CONF-005":
            return failed("model", error)
        return note("model", f"its cache is not described here, so the engine decides ({error.sentence})")
    kind = "MLA" if cache.mla else f"{cache.heads} KV heads × {cache.dim}"
    return good("model", f"{kind}, {cache.layer_words()}: nothing that the engine would refuse")


def _side(args: argparse.Namespace, options: host_checks.HostOptions) -> Any:
    """Return this side of a pair of doctors."""
    from vllm_ascend_pd.cli.checkup.pair import DoctorSide
    from vllm_ascend_pd.cli.shape import geometry_of_model

    geometry = None
    if args.model:
        divided = args.dcp, args.pcp, args.interleave
        geometry = geometry_of_model(args.model, args.tp or 1, args.block_size, args.dtype, divided)
    return DoctorSide(options, load_secrets(options.push.channel), geometry)


def _listen(args: argparse.Namespace, options: host_checks.HostOptions) -> int:
    from vllm_ascend_pd.cli.checkup import pair

    host, number = _address(args.listen, "--listen")
    channel = options.push.channel
    check_exposure(host, secured=bool(channel.secret_file), allow_unauthenticated=channel.allow_unauthenticated)
    side = _side(args, options)
    try:
        listening = socket.create_server((host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as problem:
        raise ConfigError("PD-CTRL-001", address=f"{host}:{number}", why=problem.strerror or str(problem)) from problem
    with listening:
        print(f"waiting for `vllm-ascend-pd doctor --peer {host}:{listening.getsockname()[1]}`", flush=True)
        pair.serve(side, listening, lambda words: print(one_line(words), flush=True), args.calls)
    return 0


def _address(text: str, flag: str) -> tuple[str, int]:
    host, _, number = text.rpartition(":")
    if not host or not (number.isascii() and number.isdigit()) or int(number) > 65535:
        flag_values.refuse(flag, text, "it is no host and port", "Give HOST:PORT.")
    return flag_values.host(flag, host.strip("[]")), int(number)
