# SPDX-License-Identifier: Apache-2.0
"""PushConfig: everything an operator can set, parsed once from `kv_connector_extra_config`.

A key is checked where it is declared: its type by the annotation, its range by the metadata of the field.
An unknown key is an error that names the nearest known one. The tables of keys in docs/configuration.md are printed
from here (`python -m vllm_ascend_pd.config`), so the help text of each field is what the operator reads.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.shared.settings import Setting, impossible


def _key(default: Any, owner: str, meaning: str, **bounds: Any) -> Any:
    """Declare a key. `owner`: the side that needs it."""
    setting = Setting(default=default, meaning=meaning, **bounds)
    return field(default=default, metadata={"setting": setting, "owner": owner})


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    side_channel_host: str = _key(
        "", "P, D", "address the side channel binds; not set: the engine's own address (VLLM_HOST_IP, else loopback)"
    )
    side_channel_port: int = _key(
        0,
        "P, D",
        "0: a free port, which peers learn. N: D listens on N + data-parallel rank × TP × PP + stage × TP + TP rank; "
        "P with hold_sources on N + data-parallel rank",
        low=0,
        high=65535,
    )
    advertise_host: str = _key("", "P, D", "address that peers use; not set: side_channel_host")
    secret_file: str = _key(
        "", "P, D", "file with the shared secret (mode 0600, at least 32 bytes); needed beyond loopback"
    )
    secret_file_previous: str = _key("", "P, D", "second secret that is still accepted, for rotation")
    allow_unauthenticated: bool = _key(False, "P, D", "allow a non-loopback address without a secret")


@dataclass(frozen=True, slots=True)
class MetaserverConfig:
    metaserver_urls: tuple[str, ...] = _key((), "D", "allow-list: the only metaservers D calls (scheme://host:port)")
    metaserver_max_connections: int = _key(
        2048, "D", "largest number of connections for open reservations", low=1, high=100_000
    )
    metaserver_max_queue: int = _key(
        4096, "D", "largest number of reservations that wait for a connection; more fail at once", low=1, high=1_000_000
    )
    metaserver_connect_timeout_s: float = _key(5.0, "D", "time to connect to the metaserver", low=0.05, high=120)
    tls_ca_file: str = _key("", "D", "CA certificates for an https metaserver; not set: the system's")
    tls_cert_file: str = _key("", "D", "client certificate")
    tls_key_file: str = _key("", "D", "client key")
    tls_verify: bool = _key(True, "D", "verify the metaserver's certificate")


@dataclass(frozen=True, slots=True)
class MeetConfig:
    """Settings for routers that do not go to D first (docs/routers.md)."""

    hold_sources: int = _key(
        0,
        "P",
        "largest number of requests that P computes and holds without a reservation; 0: none, and P does not listen",
        low=0,
        high=100_000,
    )
    hold_share: float = _key(0.25, "P", "largest share of the cache's blocks for these requests", low=0.0, high=1.0)
    bootstrap_port: int = _key(
        0,
        "P",
        "0: none. N: with hold_sources, the HTTP port of the first data-parallel rank, at which routers of Mooncake's "
        "dialect get the ids of this engine's ranks",
        low=0,
        high=65535,
    )
    prefill_listeners: tuple[str, ...] = _key(
        (),
        "D",
        "allow-list: the prefill engines that D offers its reservations to (host, or host:port); engines that sign "
        "their answers with the secret need no entry",
    )


@dataclass(frozen=True, slots=True)
class WireConfig:
    transport: str = _key("mooncake", "P, D", "transfer engine", choices=("mooncake", "memory"))
    mooncake_protocol: str = _key(
        "", "P, D", "not set: ascend where an NPU is present, else tcp", choices=("", "ascend", "tcp", "rdma")
    )
    model_version: str = _key(
        "",
        "P, D",
        "any word for this version of the weights, if another one may run beside it; P and D must have the same word",
    )
    transfer_timeout_s: float = _key(30.0, "P, D", "the transfer engine's own timeout for one write", low=5, high=110)
    max_descriptors: int = _key(
        1000, "P", "largest number of descriptors in flight to one peer; beyond 128 with ascend only", low=1, high=65535
    )
    fuse_layers: int = _key(
        4, "P", "largest number of ready layers that a late writer puts into one batch", low=1, high=64
    )
    first_token: str = _key(
        "auto",
        "P, D",
        "auto: D starts with P's sampled token, if this was tried; off: D computes the prompt's last token again",
        choices=("auto", "off"),
    )
    verify: str = _key(
        "off", "P, D", "full: checksum every pushed block end to end (debugging, tests)", choices=("off", "full")
    )


@dataclass(frozen=True, slots=True)
class RegroupConfig:
    regroup: str = _key(
        "auto",
        "P",
        "all-to-all by block before writing; auto: by span length (regroup_min_span)",
        choices=("auto", "always", "never"),
    )
    regroup_min_span: int = _key(16384, "P", "auto regroups when the mean span is shorter (bytes)", low=1)
    regroup_kernels: str = _key(
        "torch_npu",
        "P",
        "what gathers and assembles on an NPU: torch_npu's ops and copies, or our own kernels (never run there)",
        choices=("torch_npu", "own"),
    )
    staging_slots: int = _key(4, "P", "staging slots per destination", low=1, high=256)
    staging_destinations: int = _key(
        4, "P", "number of destinations for which staging is sized at the start", low=1, high=256
    )


@dataclass(frozen=True, slots=True)
class Timers:
    """The timers of docs/protocol.md, in seconds."""

    lease_s: float = _key(
        15.0,
        "P, D",
        "L: authority to write that a READY grants; P repeats its last message by its own",
        low=0.2,
        high=120,
    )
    margin_s: float = _key(
        5.0, "P, D", "M: stall allowance before a lease counts as lapsed; P repeats by its own", low=0.05, high=60
    )
    ready_timeout_s: float = _key(
        30.0, "P, D", "P: from the first BEGIN to READY; D: how long a BEGIN may be parked", low=0.2, high=600
    )
    stall_timeout_s: float = _key(120.0, "P", "a push that makes no progress for this long fails", low=0.2, high=3600)
    recv_deadline_s: float = _key(300.0, "D", "X: from the reservation to complete KV", low=0.5, high=86400)
    hold_s: float = _key(
        120.0, "P", "how long finished blocks wait for a reservation (P-first order)", low=0.5, high=3600
    )
    meet_s: float = _key(
        30.0, "P", "how long a reservation waits for the request with its name (both at once)", low=0.2, high=3600
    )
    first_token_wait_s: float = _key(
        0.2, "D", "how long a request with complete KV waits for P's first token", low=0.0, high=10
    )
    preempt_drain_s: float = _key(1.0, "P", "longest wait for writes that read preempted blocks", low=0.0, high=60)
    resend_first_s: float = _key(0.2, "P, D", "first repetition of an unanswered message", low=0.01, high=10)
    resend_max_s: float = _key(2.0, "P, D", "longest time between repetitions", low=0.01, high=60)
    quiet_extra_s: float = _key(
        10.0,
        "P, D",
        "T = transfer_timeout_s + this: how long a failed write may still land; at least 2 (not with memory)",
        low=0.0,
        high=60,
    )


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    trace_dir: str = _key("", "P, D", "directory for stage events, one file per process; not set: off")
    patient: bool = _key(
        True,
        "D",
        "the engine core sleeps while it waits for nothing but remote KV, instead of spinning (not if data-parallel "
        "ranks step together)",
    )


FIRST_CONTACT_S = 2.0  # a peer without an answer for this long fails the write to it; nothing of it was issued
MAX_VERSION = 64  # characters of `model_version`, which each reservation carries

# Keys of vllm-ascend's connector, which operators may still have in their configurations.
CHECKED_SIZES = ("prefill", "decode")
IGNORED = ("use_ascend_direct", "ascend_local_comm_res_path", "tls_config", "send_type", "kv_port")


@dataclass(frozen=True, slots=True)
class PushConfig:
    """One engine's configuration. `ignored` lists accepted keys of vllm-ascend's connector that mean nothing here."""

    channel: ChannelConfig = ChannelConfig()
    metaserver: MetaserverConfig = MetaserverConfig()
    meet: MeetConfig = MeetConfig()
    wire: WireConfig = WireConfig()
    regroup: RegroupConfig = RegroupConfig()
    timers: Timers = Timers()
    observe: ObserveConfig = ObserveConfig()
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> PushConfig:
        """Check every key and value. Raise ConfigError with the key, the value and the remedy."""
        owners = {f.name: (name, f) for name, group in GROUPS.items() for f in dataclasses.fields(group)}
        values: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
        sizes: dict[str, Mapping[str, int]] = {}
        ignored = []
        for key, value in extra.items():
            if key in owners:
                group, declared = owners[key]
                values[group][key] = _checked(key, value, declared, GROUPS[group])
            elif key in CHECKED_SIZES:
                sizes[key] = _checked_sizes(key, value)
            elif key in IGNORED:
                ignored.append(key)
            else:
                known = [*owners, *CHECKED_SIZES]
                nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
                raise ConfigError("PD-CONF-001", key=key, nearest=nearest[0])
        parsed = cls(
            **{name: group(**values[name]) for name, group in GROUPS.items()}, sizes=sizes, ignored=tuple(ignored)
        )
        parsed._check_together()
        return parsed

    def _check_together(self) -> None:
        if len(version := self.wire.model_version) > MAX_VERSION:
            impossible("model_version", version, f"it is longer than {MAX_VERSION} characters", "Give a shorter word.")
        t = self.timers
        if t.resend_max_s < t.resend_first_s:
            impossible(
                "resend_max_s",
                t.resend_max_s,
                f"it is below resend_first_s ({t.resend_first_s})",
                "Raise resend_max_s.",
            )
        if t.resend_first_s * 3 > t.lease_s:
            impossible(
                "lease_s",
                t.lease_s,
                "a lost renewal could not be repeated within it",
                "Raise lease_s or lower resend_first_s.",
            )
        if t.recv_deadline_s <= t.ready_timeout_s / 10:
            impossible("recv_deadline_s", t.recv_deadline_s, "no transfer could finish", "Raise recv_deadline_s.")
        if self.quiet_s > 120:
            impossible(
                "transfer_timeout_s",
                self.wire.transfer_timeout_s,
                "D refuses a quiet time above 120 s",
                "Lower transfer_timeout_s or quiet_extra_s.",
            )
        if self.wire.transport != "memory" and t.quiet_extra_s < FIRST_CONTACT_S:
            impossible(
                "quiet_extra_s",
                t.quiet_extra_s,
                f"the first write to a peer may be issued {FIRST_CONTACT_S:g} s after its submission",
                f"Give at least {FIRST_CONTACT_S:g}.",
            )
        for url in self.metaserver.metaserver_urls:
            if not _is_origin(url):
                impossible(
                    "metaserver_urls", url, "it is not scheme://host:port", "Write for example http://10.0.0.1:8000."
                )
        for listener in self.meet.prefill_listeners:
            host, _, port = listener.rpartition(":") if ":" in listener else (listener, "", "1")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                impossible("prefill_listeners", listener, "it is neither host nor host:port", "Write 10.0.0.1:5600.")
        if self.channel.secret_file_previous and not self.channel.secret_file:
            impossible(
                "secret_file_previous",
                self.channel.secret_file_previous,
                "there is no secret_file",
                "Set secret_file too.",
            )
        if self.metaserver.tls_key_file and not self.metaserver.tls_cert_file:
            impossible(
                "tls_key_file", self.metaserver.tls_key_file, "there is no tls_cert_file", "Set tls_cert_file too."
            )

    @property
    def quiet_s(self) -> float:
        """T: how long a failed write of this engine may still land."""
        return self.wire.transfer_timeout_s + self.timers.quiet_extra_s


GROUPS: dict[str, type[Any]] = {
    f.name: type(f.default) for f in dataclasses.fields(PushConfig) if dataclasses.is_dataclass(f.default)
}


def _is_origin(url: str) -> bool:
    """Return whether a URL is scheme://host:port and nothing else: the allow-list compares exactly these three."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    more = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not more


def _checked(key: str, value: Any, declared: dataclasses.Field[Any], group: type) -> Any:
    wanted = typing.get_type_hints(group)[key]
    if isinstance(wanted, types.GenericAlias):  # tuple[str, ...]
        if isinstance(value, str) or not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise ConfigError(
                "PD-CONF-002",
                key=key,
                value=value,
                expected="a list of strings",
                default=list(typing.cast("tuple[str, ...]", declared.default)),
            )
        return tuple(value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError("PD-CONF-002", key=key, value=value, expected=wanted.__name__, default=declared.default)
    declared.metadata["setting"].check(key, value)
    return value


def _checked_sizes(key: str, value: Any) -> Mapping[str, int]:
    if not isinstance(value, Mapping) or not all(
        isinstance(v, int) and not isinstance(v, bool) and v >= (k != "dp_rank") for k, v in value.items()
    ):
        raise ConfigError("PD-CONF-002", key=key, value=value, expected='a mapping such as {"tp_size": 2}', default={})
    return dict(value)


def reference() -> str:
    """Return the table of docs/configuration.md, from the declarations above; defaults as they are written in JSON."""
    lines = ["| key | default | owner | meaning | range |", "|---|---|---|---|---|"]
    for f in (f for group in GROUPS.values() for f in dataclasses.fields(group)):
        setting, default = f.metadata["setting"], json.dumps(f.default)
        lines.append(f"| `{f.name}` | `{default}` | {f.metadata['owner']} | {setting.meaning} | {setting.range} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference())
