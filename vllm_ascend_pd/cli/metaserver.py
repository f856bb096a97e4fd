# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd metaserver`: the front door. Flags become `Settings`; the service is imported only when it runs."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import logging
import math
import os
import re
import socket
import ssl
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.metaserver.decisions import CircuitPolicy, RetryPolicy, Role
from vllm_ascend_pd.shared.backoff import Backoff

if TYPE_CHECKING:
    from vllm_ascend_pd.metaserver.service.settings import Settings


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "metaserver",
        help="the HTTP service that clients and decode engines talk to",
        description="Takes clients' requests, chooses a decode and a prefill engine for each, relays the answer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    group = parser.add_argument_group("listening")
    group.add_argument("--workers", type=int, default=1, help="processes on the port for clients")
    listening(group)
    _instances(parser.add_argument_group("instances"))
    group = parser.add_argument_group("behaviour")
    behaviour(group)
    group.add_argument("--no-canary", action="store_true", help="readiness without having moved a block")
    limits(parser.add_argument_group("limits"))
    security(parser.add_argument_group("security"))
    _predecessor(parser.add_argument_group("flags of vllm-ascend's example proxy, accepted as they are"))
    telling(parser)
    parser.set_defaults(sidecar=False, prefill_allowed=[])
    return parser


def telling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace-dir", default="", metavar="DIR", help="write stage events here, one file per worker")
    parser.add_argument(
        "--otlp-traces-endpoint", default="", metavar="URL", help="send spans of requests and their two legs there"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="log level")
    parser.add_argument("--as-worker", default="", help=argparse.SUPPRESS)


def listening(group: Any) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=8000, help="port for clients; 0: a free one (one worker only)")
    group.add_argument(
        "--worker-port",
        type=int,
        default=0,
        help="worker i also listens on this + i, and decode engines call it there (list all of them in their "
        "metaserver_urls); 0: port + 1 with several workers, and the one port for everything with one",
    )
    group.add_argument("--advertise-host", default="", help="host that decode engines call back (made from --host)")
    group.add_argument("--grace", type=float, default=30.0, help="seconds that running requests get at shutdown")


def _instances(group: Any) -> None:
    group.add_argument(
        "--prefill", nargs="+", action="extend", default=[], metavar="URL", help="prefill engines; URL+N: N ports"
    )
    group.add_argument(
        "--decode", nargs="+", action="extend", default=[], metavar="URL", help="decode engines; URL+N: N ports"
    )
    group.add_argument(
        "--instances", default="", metavar="FILE", help="YAML with prefill and decode lists; read again when it changes"
    )


def behaviour(group: Any) -> None:
    group.add_argument(
        "--without-prefill",
        default="local",
        choices=("local", "refuse"),
        help="when no prefill engine is usable: the decode engine prefills by itself, or the client gets 503",
    )
    group.add_argument(
        "--prefix-tokens",
        type=int,
        default=500_000,
        help="tokens that an engine's prefix cache holds, about: prompts go where most of them was before, weighed against "
        "load; 0: by load alone",
    )
    group.add_argument(
        "--kv-events",
        nargs="+",
        action="extend",
        default=[],
        metavar="PORT",
        help="engines publish vLLM's KV events (--kv-events-config) on this port of their host, or on PORT+N, one a rank; URL=PORT: "
        "that engine does. What a prefix cache has lost is known then, not guessed by --prefix-tokens",
    )
    group.add_argument(
        "--decode-alone-tokens",
        type=int,
        default=0,
        help="a prompt of which the decode engine lacks at most so many tokens is computed there, without a prefill engine; 0: none",
    )
    group.add_argument("--attempts", type=int, default=3, help="attempts per request before its first byte")
    group.add_argument("--circuit-failures", type=int, default=3, help="consecutive failures that open a circuit")
    group.add_argument("--probe-every", type=float, default=1.0, help="seconds between two health probes")
    group.add_argument("--connect-timeout", type=float, default=3.0, help="seconds to connect to an engine")
    group.add_argument("--first-byte-timeout", type=float, default=900.0, help="seconds for a decode engine's answer")
    group.add_argument("--prefill-timeout", type=float, default=600.0, help="seconds for a prefill engine's answer")
    group.add_argument("--idle-timeout", type=float, default=300.0, help="seconds a stream may be silent")
    group.add_argument(
        "--resume-tokens",
        type=int,
        default=131_072,
        help="a greedy stream of so many tokens, prompt and answer, goes on with another decode engine when its own dies; 0: none does",
    )
    group.add_argument("--resume-mib", type=int, default=256, help="memory for that, per worker")
    group.add_argument(
        "--engine-max-new-tokens",
        type=int,
        default=0,
        help="the engines' own limit of an answer, if their generation config has one (max_new_tokens); 0: none",
    )


def limits(group: Any) -> None:
    group.add_argument("--max-running", type=int, default=4096, help="requests under way, per worker")
    group.add_argument("--max-waiting", type=int, default=1024, help="requests that wait for their turn, per worker")
    group.add_argument("--max-wait", type=float, default=30.0, help="seconds a request waits for its turn, then 429")
    group.add_argument("--max-body-mib", type=int, default=64, help="largest request body")


def security(group: Any) -> None:
    group.add_argument(
        "--admin-token-file", default="", help="file (mode 0600) with the bearer token of /instances and /status"
    )
    group.add_argument(
        "--engine-token-file", default="", help="file (mode 0600) with the engines' API key, for who brings none"
    )
    group.add_argument("--tls-cert", default="", help="certificate chain: serve https")
    group.add_argument("--tls-key", default="", help="its key")
    group.add_argument("--engine-ca", default="", help="CA certificates of https engines (the system's)")


def _predecessor(group: Any) -> None:
    for role, name in (("prefiller", "prefill"), ("decoder", "decode")):
        group.add_argument(
            f"--{role}-hosts", nargs="+", action="extend", default=[], metavar="HOST", help=f"hosts of {name} engines"
        )
        group.add_argument(
            f"--{role}-ports", nargs="+", action="extend", type=int, default=[], metavar="PORT", help="their ports"
        )
        for flag, meaning in (
            ("hosts-num", "how often each host counts"),
            ("ports-inc", "how many ports from each on"),
        ):
            group.add_argument(
                f"--{role}-{flag}", nargs="+", action="extend", type=int, default=[], metavar="N", help=meaning
            )
    group.add_argument("--max-retries", type=int, default=None, help="same as --attempts")
    group.add_argument("--retry-delay", type=float, default=None, help="first delay between attempts, in seconds")


# Values of these flags for a subcommand that does not have them.
NO_PREDECESSOR: dict[str, Any] = {
    **{
        f"{role}_{flag}": []
        for role in ("prefiller", "decoder")
        for flag in ("hosts", "ports", "hosts_num", "ports_inc")
    },
    "max_retries": None,
    "retry_delay": None,
}


def settings_of(args: argparse.Namespace) -> Settings:
    """Turn flags into settings. Raise ConfigError for a value that cannot be used."""
    from vllm_ascend_pd.metaserver.service.settings import Settings, read_token

    _check(args)
    _check_tls(args)
    _check_trace_dir(args.trace_dir)
    attempts = args.max_retries if args.max_retries is not None else args.attempts
    usual = RetryPolicy().backoff
    first = args.retry_delay if args.retry_delay is not None else usual.first_s
    settings = Settings(
        host=args.host,
        port=args.port,
        advertise_host=args.advertise_host,
        workers=args.workers,
        worker_port=args.worker_port,
        grace_s=args.grace,
        prefill=_named(Role.PREFILL, args, "prefiller"),
        decode=_named(Role.DECODE, args, "decoder"),
        instances_file=args.instances,
        without_prefill=args.without_prefill,
        sidecar=args.sidecar,
        prefill_allowed=tuple(args.prefill_allowed),
        prefix_tokens=args.prefix_tokens,
        kv_events=tuple(args.kv_events),
        decode_alone=args.decode_alone_tokens,
        retry=RetryPolicy(max(1, attempts), Backoff(first, max(first, usual.longest_s))),
        circuit=CircuitPolicy(threshold=args.circuit_failures),
        canary=not args.no_canary,
        connect_timeout_s=args.connect_timeout,
        prefill_timeout_s=args.prefill_timeout,
        first_byte_timeout_s=args.first_byte_timeout,
        idle_timeout_s=args.idle_timeout,
        probe_every_s=args.probe_every,
        resume_tokens=args.resume_tokens,
        resume_bytes=args.resume_mib << 20,
        resume_ceiling=args.engine_max_new_tokens,
        max_body_bytes=args.max_body_mib << 20,
        max_running=args.max_running,
        max_waiting=args.max_waiting,
        max_wait_s=args.max_wait,
        admin_token=read_token(args.admin_token_file),
        engine_token=read_token(args.engine_token_file),
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        engine_ca=args.engine_ca,
        trace_dir=args.trace_dir,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
    )
    _check_roles(settings)
    _check_allowed(settings)
    _check_events(settings)
    return settings


_POSITIVE = (
    *("workers", "attempts", "circuit_failures", "probe_every", "connect_timeout", "first_byte_timeout"),
    *("prefill_timeout", "idle_timeout", "max_running", "max_body_mib", "grace"),
)
_NOT_NEGATIVE = (
    *("resume_tokens", "resume_mib", "engine_max_new_tokens", "prefix_tokens", "decode_alone_tokens"),
    *("max_waiting", "max_wait", "max_retries", "retry_delay"),
)
_LEAST_PROBE_S = 0.01


def _check(args: argparse.Namespace) -> None:
    for name in (*_POSITIVE, *_NOT_NEGATIVE):
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
        if value is None:
            continue
        if not math.isfinite(value):
            _impossible(flag, value, "it is not a finite number", "Give a number.")
        if name in _POSITIVE and value <= 0:
            _impossible(flag, value, "it is not positive", "Give more than 0.")
        if value < 0:
            _impossible(flag, value, "it is negative", "Give 0 or more.")
    if args.probe_every < _LEAST_PROBE_S:
        why = "the engines would be asked without a pause"
        _impossible("--probe-every", args.probe_every, why, f"Give {_LEAST_PROBE_S} or more.")
    if args.advertise_host and not _is_host(args.advertise_host):
        why = "it is neither a host name nor an address"
        _impossible("--advertise-host", args.advertise_host, why, "Give it without scheme and port.")
    _check_ports(args)
    if bool(args.tls_cert) != bool(args.tls_key):
        _impossible("--tls-cert", args.tls_cert, "certificate and key belong together", "Give both or none.")


def _is_host(text: str) -> bool:
    if re.fullmatch(r"[\w.-]+", text):
        return True
    try:
        ipaddress.IPv6Address(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
    except ValueError:
        return False
    return True


def _check_ports(args: argparse.Namespace) -> None:
    from vllm_ascend_pd.metaserver.service.fleet import LAST_PORT

    for flag, port in (("--port", args.port), ("--worker-port", args.worker_port)):
        if not 0 <= port <= LAST_PORT:
            _impossible(flag, port, "there is no such port", f"Give a port from 1 to {LAST_PORT}.")
    if args.workers > 1 and args.port == 0:
        _impossible("--port", 0, "several workers need a known port", "Give a port, or one worker.")
    first = args.worker_port or args.port + 1
    if args.workers > 1 and first + args.workers - 1 > LAST_PORT:
        flag, port = ("--worker-port", args.worker_port) if args.worker_port else ("--port", args.port)
        why = f"{args.workers} workers have ports of their own from {first} on, and the last there is is {LAST_PORT}"
        _impossible(flag, port, why, "Give a lower port, or another --worker-port.")


def _check_roles(settings: Settings) -> None:
    from vllm_ascend_pd.metaserver.service.fleet import parse_specs

    prefill = {spec.name for text in settings.prefill for spec in parse_specs(Role.PREFILL, text)}
    for text in settings.decode:
        if any(spec.name in prefill for spec in parse_specs(Role.DECODE, text)):
            why = "the same address is given as a prefill engine"
            _impossible("--decode", text, why, "Name each engine in one role, with its own port.")


def _check_allowed(settings: Settings) -> None:
    from vllm_ascend_pd.metaserver.service.named import Allowed

    for text in settings.prefill_allowed:
        try:
            Allowed.parse(text)
        except ValueError as problem:
            _impossible("--prefill-allowed", text, str(problem), "Give a host or a network, with or without :port.")


def _check_events(settings: Settings) -> None:
    from vllm_ascend_pd.metaserver.service.cache_events import parse_ports

    try:
        parse_ports(settings.kv_events)
    except ValueError as problem:
        text, remedy = " ".join(settings.kv_events), "Give PORT, PORT+N, URL=PORT or URL+N=PORT+N."
        _impossible("--kv-events", text, str(problem), remedy)
    if settings.kv_events and not settings.prefix_tokens:
        why = "with --prefix-tokens 0 engines are chosen by load alone"
        _impossible("--kv-events", " ".join(settings.kv_events), why, "Leave one of the two out.")


def _check_trace_dir(directory: str) -> None:
    """Check that workers can write there."""
    if not directory:
        return
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as problem:
        why = f"nothing can be written there ({problem.strerror or problem})"
        _impossible("--trace-dir", directory, why, "Give a directory that this user may write into.")


def _check_tls(args: argparse.Namespace) -> None:
    """Read what the servers will read, so that an error is reported at the start."""
    try:
        if args.tls_cert:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.tls_cert, args.tls_key)
    except OSError as problem:
        why = f"certificate and key cannot be used ({problem})"
        _impossible("--tls-cert", args.tls_cert, why, "Give files in PEM form that belong together.")
    try:
        if args.engine_ca:
            ssl.create_default_context(cafile=args.engine_ca)
    except OSError as problem:
        _impossible("--engine-ca", args.engine_ca, str(problem), "Give a file with certificates in PEM form.")


def _named(role: Role, args: argparse.Namespace, word: str) -> tuple[str, ...]:
    """Return the instances of a role, from our flags and the predecessor's."""
    from vllm_ascend_pd.metaserver.service.fleet import MAX_ENDPOINTS, parse_specs

    def of(flag: str) -> list[Any]:
        return list(getattr(args, f"{word}_{flag.replace('-', '_')}"))

    def counted(what: str, flag: str) -> list[tuple[Any, int]]:
        each, counts = of(what), of(flag) or [1] * len(of(what))
        if len(counts) != len(each) or not all(1 <= count <= MAX_ENDPOINTS for count in counts):
            why = f"there are {len(each)} {what}, and it says how often each counts"
            _impossible(f"--{word}-{flag}", counts, why, f"Give a number for each, from 1 to {MAX_ENDPOINTS}.")
        return list(zip(each, counts, strict=True))

    hosts = [host for host, count in counted("hosts", "hosts-num") for _ in range(count)]
    ports = [first + i for first, count in counted("ports", "ports-inc") for i in range(count)]
    if len(hosts) != len(ports):
        why = f"there are {len(hosts)} hosts and {len(ports)} ports"
        _impossible(f"--{word}-hosts", hosts, why, "Give as many ports as hosts.")
    pairs = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    texts = (*getattr(args, role.value), *pairs)
    for text in texts:
        try:
            parse_specs(role, text)
        except ValueError as problem:
            _impossible(
                f"--{role.value}", text, str(problem), "Give host:port, or http(s)://host:port, or …:port+count."
            )
    return texts


def _impossible(flag: str, value: object, why: str, remedy: str) -> None:
    raise ConfigError("PD-CONF-003", key=flag, value=value, why=why, remedy=remedy)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    settings = settings_of(args)
    from vllm_ascend_pd.metaserver.service.server import listen, run_worker

    if args.as_worker:
        from vllm_ascend_pd.metaserver.service.hub import Hub

        worker, *fds, members = map(int, args.as_worker.split(":"))
        public, own, line = (socket.socket(fileno=fd) for fd in fds)
        with os.fdopen(members, "rb") as told:
            settings = dataclasses.replace(settings, members=told.read())
        return run_worker(settings, [public, own], Hub(worker, line))
    if settings.workers > 1:
        from vllm_ascend_pd.metaserver.service.supervisor import Supervisor, worker_command

        return Supervisor(settings, worker_command(args.argv)).run()
    sockets = [listen(settings.host, settings.port)]
    if settings.worker_port:
        sockets.append(listen(settings.host, settings.worker_port))
    return run_worker(settings, sockets)
