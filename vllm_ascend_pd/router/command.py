# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd metaserver`: the front door. Flags become `Settings`; the service is imported only when it runs."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import ipaddress
import json
import logging
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.observe.log_thread import logged
from vllm_ascend_pd.router.core.decisions import RetryPolicy, Role
from vllm_ascend_pd.router.settings import LAST_PORT, Settings, add_flags, values_of
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.exposure import is_loopback
from vllm_ascend_pd.shared.settings import Setting, impossible

_ZERO_OR_MORE = Setting(default=None, meaning="a flag of the predecessor's router", low=0)
_MAX_LOGGED = 4000  # characters of a line of the log


class LineByLine(logging.Formatter):
    """A line for each record: what an engine or a caller says must not look like other lines, or act on a terminal.

    The further lines of a traceback are indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        record.message = one_line(record.message, _MAX_LOGGED)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join("  " + one_line(line, _MAX_LOGGED) for line in super().formatException(ei).splitlines())


class JsonLines(logging.Formatter):
    """A JSON object for each record, in a line of its own, which nobody's words can end."""

    def format(self, record: logging.LogRecord) -> str:
        said = record.getMessage()[:_MAX_LOGGED]
        when = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname, "logger": record.name, "message": said}
        if code := re.search(r"\bPD-[A-Z]+-\d{3}\b", said):
            line["code"] = code[0]
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)[-_MAX_LOGGED:]
        return json.dumps(line)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "metaserver",
        help="the HTTP service that clients and decode engines talk to",
        description="Takes clients' requests, chooses a decode and a prefill engine for each, relays the answer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    common(parser, "metaserver")
    _predecessor(parser.add_argument_group("flags of vllm-ascend's example proxy, accepted as they are"))
    return parser


def common(parser: argparse.ArgumentParser, subcommand: str) -> dict[str, Any]:
    """Add what both subcommands have. Return the parser's groups by title."""
    groups = add_flags(parser, subcommand)
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="log level")
    parser.add_argument("--log-format", default="text", choices=("text", "json"), help="json: an object in each line")
    parser.add_argument("--as-worker", default="", help=argparse.SUPPRESS)
    return groups


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


def settings_of(args: argparse.Namespace) -> Settings:
    """Turn flags into settings. Raise ConfigError for a value that cannot be used."""
    given = vars(args)
    values = values_of(given)
    for role, word in ((Role.PREFILL, "prefiller"), (Role.DECODE, "decoder")):
        values[role.value] = _named(role, values.get(role.value, ()), given, word)
    settings = Settings(**values, sidecar=given.get("sidecar", False))
    settings = dataclasses.replace(settings, retry=_retry(settings.retry, given))
    if settings.advertise_host and not _is_host(settings.advertise_host):
        why = "it is neither a host name nor an address"
        impossible("--advertise-host", settings.advertise_host, why, "Give it without scheme and port.")
    _check_ports(settings)
    _check_tls(settings)
    _check_keys(settings)
    _check_trace_dir(settings.trace_dir)
    _check_roles(settings)
    _check_allowed(settings)
    _check_events(settings)
    return settings


def _retry(usual: RetryPolicy, given: dict[str, Any]) -> RetryPolicy:
    """Return the policy with what the predecessor's flags change about it."""
    attempts, first = given.get("max_retries"), given.get("retry_delay")
    if attempts is not None:
        _ZERO_OR_MORE.check("--max-retries", attempts)
        usual = RetryPolicy(max(1, attempts), usual.backoff)
    if first is not None:
        _ZERO_OR_MORE.check("--retry-delay", first)
        usual = RetryPolicy(usual.attempts, Backoff(first, max(first, usual.backoff.longest_s)))
    return usual


def _is_host(text: str) -> bool:
    if re.fullmatch(r"[\w.-]+", text):
        return True
    try:
        ipaddress.IPv6Address(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
    except ValueError:
        return False
    return True


def _check_ports(settings: Settings) -> None:
    if settings.workers == 1:
        return
    if settings.port == 0:
        impossible("--port", 0, "several workers need a known port", "Give a port, or one worker.")
    first = settings.worker_port or settings.port + 1
    if first + settings.workers - 1 > LAST_PORT:
        by_port = ("--port", settings.port)
        flag, port = ("--worker-port", settings.worker_port) if settings.worker_port else by_port
        why = (
            f"{settings.workers} workers have ports of their own from {first} on, and the last there is is {LAST_PORT}"
        )
        impossible(flag, port, why, "Give a lower port, or another --worker-port.")


def _check_roles(settings: Settings) -> None:
    from vllm_ascend_pd.router.fleet import parse_specs

    prefill = {spec.name for text in settings.prefill for spec in parse_specs(Role.PREFILL, text)}
    for text in settings.decode:
        if any(spec.name in prefill for spec in parse_specs(Role.DECODE, text)):
            why = "the same address is given as a prefill engine"
            impossible("--decode", text, why, "Name each engine in one role, with its own port.")


def _check_allowed(settings: Settings) -> None:
    from vllm_ascend_pd.router.named import Allowed

    for text in settings.prefill_allowed:
        try:
            Allowed.parse(text)
        except ValueError as problem:
            impossible("--prefill-allowed", text, str(problem), "Give a host or a network, with or without :port.")


def _check_events(settings: Settings) -> None:
    from vllm_ascend_pd.router.cache_events import parse_ports

    try:
        parse_ports(settings.kv_events)
    except ValueError as problem:
        text, remedy = " ".join(settings.kv_events), "Give PORT, PORT+N, URL=PORT or URL+N=PORT+N."
        impossible("--kv-events", text, str(problem), remedy)
    if settings.kv_events and not settings.prefix_tokens:
        why = "with --prefix-tokens 0 engines are chosen by load alone"
        impossible("--kv-events", " ".join(settings.kv_events), why, "Leave one of the two out.")


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
        impossible("--trace-dir", directory, why, "Give a directory that this user may write into.")


def _check_tls(settings: Settings) -> None:
    """Read what the servers will read, so that an error is reported at the start."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        impossible("--tls-cert", settings.tls_cert, "certificate and key belong together", "Give both or none.")
    try:
        settings.own_tls()
    except OSError as problem:
        why = f"certificate and key cannot be used ({problem})"
        impossible("--tls-cert", settings.tls_cert, why, "Give files in PEM form that belong together.")
    try:
        settings.engine_tls()
    except OSError as problem:
        impossible("--engine-ca", settings.engine_ca, str(problem), "Give a file with certificates in PEM form.")


def _check_keys(settings: Settings) -> None:
    flag, lent = "--lend-engine-token", settings.lend_engine_token
    if lent and not settings.engine_token:
        impossible(flag, lent, "there is no key to lend", "Give --engine-token-file, too.")
    if lent and not (settings.client_tokens or is_loopback(settings.host)):
        why = f"every caller that reaches {settings.host or 'an address of this host'} could use the engines with their key"
        impossible(flag, lent, why, "Give --client-token-file, too, or listen on loopback.")


def _named(role: Role, ours: tuple[str, ...], given: dict[str, Any], word: str) -> tuple[str, ...]:
    """Return the instances of a role, from our flag and the predecessor's."""
    from vllm_ascend_pd.router.fleet import MAX_ENDPOINTS, parse_specs

    def of(flag: str) -> list[Any]:
        return list(given.get(f"{word}_{flag.replace('-', '_')}", ()))

    def counted(what: str, flag: str) -> list[tuple[Any, int]]:
        each, counts = of(what), of(flag) or [1] * len(of(what))
        if len(counts) != len(each) or not all(1 <= count <= MAX_ENDPOINTS for count in counts):
            why = f"there are {len(each)} {what}, and it says how often each counts"
            impossible(f"--{word}-{flag}", counts, why, f"Give a number for each, from 1 to {MAX_ENDPOINTS}.")
        return list(zip(each, counts, strict=True))

    hosts = [host for host, count in counted("hosts", "hosts-num") for _ in range(count)]
    ports = [first + i for first, count in counted("ports", "ports-inc") for i in range(count)]
    if len(hosts) != len(ports):
        why = f"there are {len(hosts)} hosts and {len(ports)} ports"
        impossible(f"--{word}-hosts", hosts, why, "Give as many ports as hosts.")
    pairs = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    texts = (*ours, *pairs)
    for text in texts:
        try:
            parse_specs(role, text)
        except ValueError as problem:
            impossible(
                f"--{role.value}", text, str(problem), "Give host:port, or http(s)://host:port, or …:port+count."
            )
    return texts


def run(args: argparse.Namespace) -> int:
    text = LineByLine("%(asctime)s %(levelname)s %(message)s")
    with logged(2, JsonLines() if args.log_format == "json" else text, args.log_level.upper()):
        return _serve(args, settings_of(args))


def _serve(args: argparse.Namespace, settings: Settings) -> int:
    from vllm_ascend_pd.router.server import listen, run_worker

    if args.as_worker:
        from vllm_ascend_pd.router.hub import Hub

        worker, *fds, members = map(int, args.as_worker.split(":"))
        public, private, line = (socket.socket(fileno=fd) for fd in fds)
        with os.fdopen(members, "rb") as file:
            settings = dataclasses.replace(settings, members=file.read())
        return run_worker(settings, [public, private], Hub(worker, line))
    if settings.workers > 1:
        from vllm_ascend_pd.router.supervisor import Supervisor, worker_command

        return Supervisor(settings, worker_command(args.argv)).run()
    sockets = [listen(settings.host, settings.port)]
    if settings.worker_port:
        sockets.append(listen(settings.host, settings.worker_port))
    return run_worker(settings, sockets)
