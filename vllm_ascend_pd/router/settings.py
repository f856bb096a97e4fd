# SPDX-License-Identifier: Apache-2.0
"""All settings of the metaserver. A setting with a flag is declared here once: name, default, bounds, meaning.

The parsers of `command.py` and `sidecar.py`, the check of each value, and the table in docs/configuration.md
(`python -m vllm_ascend_pd.router.settings`) follow from that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import operator
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, RetryPolicy
from vllm_ascend_pd.secret_files import read_private
from vllm_ascend_pd.shared.settings import Setting
from vllm_ascend_pd.shared.tls_files import TlsFiles

LAST_PORT = 65535
_TOKEN = re.compile(rb"[!-~]{16,}")
_SERVICE = "[NAMESPACE/]NAME[:PORT]"


def _same(value: Any) -> Any:
    return value


def _mib(value: int) -> int:
    return value << 20


def read_tokens(path: str) -> tuple[str, ...]:
    """Return the secrets in a token file, one a line; other users must not be able to read it."""
    if not path:
        return ()
    words = read_private(path, "PD-SEC-004").split()
    if not words or not all(map(_TOKEN.fullmatch, words)):
        raise ConfigError("PD-SEC-004", path=path, why="each word in it must be at least 16 ASCII characters")
    return tuple(word.decode("ascii") for word in words)


def read_token(path: str) -> str:
    tokens = read_tokens(path)
    if len(tokens) > 1:
        raise ConfigError("PD-SEC-004", path=path, why="it must hold one word")
    return tokens[0] if tokens else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(Setting):
    """The flag of one setting. `default` is in the flag's form, and `made` turns that form into the setting."""

    name: str
    group: str
    metavar: str | None = None
    only: str = ""  # the one subcommand that has it; empty: both
    required: bool = False
    made: Callable[[Any], Any]

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    def add_to(self, group: Any) -> None:
        facts: dict[str, Any] = {"default": self.default, "help": self.meaning}
        if isinstance(self.default, bool):
            group.add_argument(self.name, action="store_true", **facts)
            return
        if isinstance(self.default, list):
            facts |= {"nargs": "+", "action": "extend", "required": self.required}
        elif isinstance(self.default, int | float):
            facts["type"] = type(self.default)
        if self.choices:
            facts["choices"] = self.choices
        group.add_argument(self.name, metavar=self.metavar, **facts)


def _flag(group: str, name: str, default: Any, meaning: str, **facts: Any) -> Any:
    made = facts.pop("made", tuple if isinstance(default, list) else _same)
    flag = Flag(name=name, group=group, default=default, meaning=meaning, made=made, **facts)
    return field(default=flag.made(default), metadata={"flag": flag})


_listening, _instances, _behaviour, _limits, _security, _observation = (
    partial(_flag, group) for group in ("listening", "instances", "behaviour", "limits", "security", "observation")
)


@dataclass(frozen=True, slots=True)
class Settings:
    workers: int = _listening("--workers", 1, "processes on the port for clients", low=1, only="metaserver")
    host: str = _listening("--host", "127.0.0.1", "address to listen on, which decode engines must be able to reach")
    port: int = _listening("--port", 8000, "port for clients; 0: a free one (one worker only)", low=0, high=LAST_PORT)
    worker_port: int = _listening(
        "--worker-port",
        0,
        "worker i also listens on this + i, and decode engines call it there (list all of them in their "
        "metaserver_urls); 0: port + 1 with several workers, and the one port for everything with one",
        low=0,
        high=LAST_PORT,
    )
    advertise_host: str = _listening(
        "--advertise-host", "", "host that decode engines call back; not set: made from --host"
    )
    grace_s: float = _listening("--grace", 30.0, "seconds that running requests get at shutdown", above=0)

    prefill: tuple[str, ...] = _instances(
        "--prefill", [], "prefill engines; URL+N: N ports", metavar="URL", only="metaserver"
    )
    decode: tuple[str, ...] = _instances(
        "--decode", [], "decode engines; URL+N: N ports", metavar="URL", only="metaserver"
    )
    instances_file: str = _instances(
        "--instances",
        "",
        "YAML with prefill and decode lists; read again when it changes",
        metavar="FILE",
        only="metaserver",
    )
    prefill_service: str = _instances(
        "--prefill-service",
        "",
        "Kubernetes Service whose ready pods are prefill engines; its EndpointSlices are watched",
        metavar=_SERVICE,
        only="metaserver",
    )
    decode_service: str = _instances(
        "--decode-service", "", "as --prefill-service, of decode engines", metavar=_SERVICE, only="metaserver"
    )
    kubernetes_api: str = _instances(
        "--kubernetes-api",
        "",
        "URL of the Kubernetes API; not set: the one that pods are given",
        metavar="URL",
        only="metaserver",
    )
    members: bytes = b""  # of a worker: the supervisor's instances, in place of all these
    sidecar: bool = False  # of one D: requests name their P's themselves
    prefill_allowed: tuple[str, ...] = _instances(
        "--prefill-allowed",
        [],
        "which prefill engines requests may name: host, network (10.0.0.0/8), either with :port",
        metavar="HOST",
        only="sidecar",
        required=True,
    )

    without_prefill: str = _behaviour(
        "--without-prefill",
        "local",
        "when no prefill engine is usable: the decode engine prefills by itself, or the client gets 503",
        choices=("local", "refuse"),
    )
    prefix_tokens: int = _behaviour(
        "--prefix-tokens",
        500_000,
        "tokens that an engine's prefix cache holds, about: a prompt goes to the engine that had most of it before, weighed "
        "against load; 0: by load alone",
        low=0,
    )
    kv_events: tuple[str, ...] = _behaviour(
        "--kv-events",
        [],
        "engines publish vLLM's KV events (--kv-events-config) on this port of their host, or on PORT+N, one a rank; "
        "URL=PORT: that engine does. What a prefix cache has lost is known then, not guessed by --prefix-tokens",
        metavar="PORT",
    )
    decode_alone: int = _behaviour(
        "--decode-alone-tokens",
        0,
        "a prompt of which the decode engine lacks at most so many tokens is computed there, without a prefill engine; "
        "0: none",
        low=0,
    )
    retry: RetryPolicy = _behaviour(  # noqa: RUF009 (a policy is frozen)
        "--attempts", 3, "attempts per request before its first byte", low=1, made=RetryPolicy
    )
    circuit: CircuitPolicy = _behaviour(  # noqa: RUF009
        "--circuit-failures", 3, "consecutive failures that open a circuit", low=1, made=CircuitPolicy
    )
    probe_every_s: float = _behaviour("--probe-every", 1.0, "seconds between two health probes", low=0.01)
    connect_timeout_s: float = _behaviour("--connect-timeout", 3.0, "seconds to connect to an engine", above=0)
    first_byte_timeout_s: float = _behaviour(
        "--first-byte-timeout", 900.0, "seconds for a decode engine's answer", above=0
    )
    prefill_timeout_s: float = _behaviour("--prefill-timeout", 600.0, "seconds for a prefill engine's answer", above=0)
    idle_timeout_s: float = _behaviour(
        "--idle-timeout", 300.0, "seconds a stream may be silent after its first byte", above=0
    )
    resume_tokens: int = _behaviour(
        "--resume-tokens",
        131_072,
        "an answer of so many tokens, with its prompt, goes on with another decode engine when its own fails; 0: none does",
        low=0,
    )
    resume_bytes: int = _behaviour("--resume-mib", 256, "memory for that, per worker", low=0, made=_mib)
    resume_seeded: bool = _behaviour(
        "--no-resume-seeded",
        False,
        "an answer that is sampled with a seed does not go on: its random generator would begin anew",
        made=operator.not_,
    )
    canary: bool = _behaviour(
        "--no-canary",
        False,
        "send no canaries: ready as soon as both roles are healthy",
        only="metaserver",
        made=operator.not_,
    )

    max_running: int = _limits("--max-running", 4096, "requests under way, per worker", low=1)
    max_waiting: int = _limits("--max-waiting", 1024, "requests that wait for their turn, per worker", low=0)
    max_wait_s: float = _limits("--max-wait", 30.0, "seconds a request waits for its turn, then 429", low=0)
    max_body_bytes: int = _limits("--max-body-mib", 64, "largest request body", low=1, made=_mib)

    admin_token: str = _security(
        "--admin-token-file", "", "file (mode 0600) with the bearer token of /instances and /status", made=read_token
    )
    engine_token: str = _security(
        "--engine-token-file",
        "",
        "file (mode 0600) with the engines' API key, for probes, model lists and canaries; clients bring their own",
        made=read_token,
    )
    client_tokens: tuple[str, ...] = _security(
        "--client-token-file",
        "",
        "file (mode 0600) with clients' keys, one a line: a request that would reach an engine needs one of them as its "
        "bearer token",
        made=read_tokens,
    )
    lend_engine_token: bool = _security(
        "--lend-engine-token",
        False,
        "clients' requests go to the engines with the engines' key. Needs --client-token-file, or a --host that is loopback",
    )
    tls_cert: str = _security("--tls-cert", "", "certificate chain: serve https")
    tls_key: str = _security("--tls-key", "", "its key")
    engine_ca: str = _security("--engine-ca", "", "CA certificates of https engines; not set: the system's")

    deployment: str = _observation(
        "--deployment", "", "name of this deployment, which the status page shows", metavar="NAME"
    )
    trace_dir: str = _observation("--trace-dir", "", "write stage events here, one file per worker", metavar="DIR")
    otlp_traces_endpoint: str = _observation(
        "--otlp-traces-endpoint", "", "send spans of requests and their two legs there", metavar="URL"
    )

    # No flag sets these: the rules of the service rest on them.
    probe_timeout_s: float = 2.0
    refusing_s: float = 5.0  # silence of a request whose engine refuses connections
    unreachable_s: float = 20.0  # and of one whose engine is unreachable
    heartbeat_s: float = 2.0

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    def own_tls(self) -> ssl.SSLContext | None:
        """Return the TLS context to serve with; None: serve http."""
        if not self.tls_cert:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.tls_cert, self.tls_key)
        return context

    def engine_tls(self) -> TlsFiles:
        """Return the TLS context for https engines; without `engine_ca` with the system's certificates."""
        tls = TlsFiles(lambda: ssl.create_default_context(cafile=self.engine_ca or None), self.engine_ca)
        if self.engine_ca:
            tls.context()  # else the first request would find out that it cannot be read
        return tls


FLAGS: dict[str, Flag] = {f.name: f.metadata["flag"] for f in dataclasses.fields(Settings) if f.metadata}


def add_flags(parser: argparse.ArgumentParser, subcommand: str) -> dict[str, Any]:
    """Add each flag that the subcommand has. Return the parser's groups by title."""
    groups: dict[str, Any] = {}
    for flag in FLAGS.values():
        if flag.only in ("", subcommand):
            if flag.group not in groups:
                groups[flag.group] = parser.add_argument_group(flag.group)
            flag.add_to(groups[flag.group])
    return groups


def values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of parsed flags, and return the settings that they make."""
    present = {name: flag for name, flag in FLAGS.items() if flag.dest in given}
    for flag in present.values():
        flag.check(flag.name, given[flag.dest])
    return {name: flag.made(given[flag.dest]) for name, flag in present.items()}


def reference() -> str:
    """Return the table of flags in docs/configuration.md, from the declarations above."""
    lines = ["| flag | default | range | meaning |", "|---|---|---|---|"]
    for flag in FLAGS.values():
        default = (
            "off" if flag.default is False else "–" if flag.default in ("", []) else f"`{json.dumps(flag.default)}`"
        )
        only = f" (`{flag.only}` only)" if flag.only else ""
        lines.append(f"| `{flag.name}` | {default} | {flag.range} | {flag.meaning}{only} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference())
