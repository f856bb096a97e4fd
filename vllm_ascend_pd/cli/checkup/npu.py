# SPDX-License-Identifier: Apache-2.0
"""Checks of a host with Ascend NPUs: CANN, hccn.conf, links, Mooncake's environment. None has run on such a host.

What hccn_tool and npu-smi print is known from the vendor's manuals and the source of its driver.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from vllm_ascend_pd.cli.checkup.check import Check, failure, good, note, warning
from vllm_ascend_pd.cli.checkup.host import KNOWN, ROOT, HostOptions, version
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.transport.package import ascend_timeouts

TOOL = "usr/local/Ascend/driver/tools/hccn_tool"
SMI = "usr/local/sbin/npu-smi"
TOOL_S = 10.0
_CANN_FILES = ("version.cfg", "version.info", "compiler/version.info", "runtime/version.info")

RunCommand = Callable[[list[str]], str]


def present(root: Path = ROOT) -> bool:
    return (root / "dev/davinci_manager").exists()


def checks(options: HostOptions, root: Path = ROOT) -> Iterator[Check]:
    if not options.on_npu:
        if version("torch_npu", "torch-npu") and not options.environ.get("ASCEND_HOME_PATH"):
            says = "torch_npu is installed without CANN: it breaks `import torch` itself"
            yield failure("npu", says, "Set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or load CANN's set_env.sh.")
        else:
            yield note("npu", "none here: CANN, hccn.conf and links are not looked at")
        return
    devices = sorted(
        int(match[1]) for path in (root / "dev").iterdir() if (match := re.fullmatch(r"davinci(\d+)", path.name))
    )
    yield (
        good("npu", f"{len(devices)}: {', '.join(map(str, devices))}")
        if devices
        else failure(
            "npu", "/dev/davinci_manager without a device", "Give the container its devices (examples/docker-compose)."
        )
    )
    yield cann(options.environ, root)
    yield hccn_conf(root, devices)
    yield from links(root, devices)
    yield health(root, devices)
    yield tls(root, devices)
    yield super_pod(root)
    yield from environment(options)
    yield network(options.environ, tuple(name for _, name in socket.if_nameindex()))


def cann(environ: Mapping[str, str], root: Path = ROOT) -> Check:
    home = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME")
    remedy = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
    if not home:
        return failure("cann", "its environment is not loaded", remedy)
    folder = root / home.lstrip("/")
    for name in _CANN_FILES:
        file = folder / name
        match = re.search(r"[Vv]ersion\w*\s*=\s*\[?([\d.]+\w*)", file.read_text()) if file.exists() else None
        if match:
            return _cann_of(match[1])
    return warning(
        "cann", f"{home} does not say its version", "Compare it with vllm-ascend's page of releases by hand."
    )


def _cann_of(number: str) -> Check:
    row = next((row for row in KNOWN if row["vllm"] == version("vllm")), None)
    wanted = row.get("cann", "") if row else ""
    if not wanted:
        return good("cann", f"{number}: no known pair says which one belongs to this vLLM")
    remedy = f"vllm-ascend for vLLM {version('vllm')} is released with CANN {wanted}."
    if number.split(".")[0] != wanted.split(".")[0]:
        return failure("cann", number, remedy)
    if number.split(".")[:2] != wanted.split(".")[:2]:
        return warning("cann", number, remedy)
    return good("cann", number)


def hccn_conf(root: Path, devices: list[int]) -> Check:
    file = root / "etc/hccn.conf"
    remedy = "Mount the host's /etc/hccn.conf into the container; hccn_tool -i N -ip -s … writes it."
    if not file.is_file():
        return failure("hccn.conf", "/etc/hccn.conf is missing: Mooncake finds no address of an NPU", remedy)
    named = {int(number) for number in re.findall(r"^address_(\d+)\s*=\s*\S+", file.read_text(), re.MULTILINE)}
    missing = [device for device in devices if device not in named]
    if missing:
        return failure("hccn.conf", f"no address for NPU {', '.join(map(str, missing))}", remedy)
    return good("hccn.conf", f"addresses of {len(named)} NPUs")


def _run(words: list[str]) -> str:
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=TOOL_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    return done.stdout + done.stderr


def _tool(root: Path, name: str = TOOL) -> str:
    return str(root / name) if (root / name).exists() else shutil.which(Path(name).name) or ""


def links(root: Path, devices: list[int], run: RunCommand = _run) -> Iterator[Check]:
    tool = _tool(root)
    if not tool:
        yield note("links", "hccn_tool is not here: link states are not looked at", "Mount /usr/local/Ascend/driver.")
        return
    for device in devices:
        said = run([tool, "-i", str(device), "-link", "-g"])
        if re.search(r"link status:\s*UP", said, re.IGNORECASE):
            yield good("links", f"NPU {device} is up")
        else:
            words = " ".join(said.split())[:120] or "no answer"
            yield failure("links", f"NPU {device}: {words}", "Check the cable and the switch.")


def health(root: Path, devices: list[int], run: RunCommand = _run) -> Check:
    """Check what each NPU's own probe of the network says: whether the address that it is told to try answers."""
    tool = _tool(root)
    said = {device: run([tool, "-i", str(device), "-net_health", "-g"]) for device in devices} if tool else {}
    answers = {
        device: match[1] for device, words in said.items() if (match := re.search(r"health status:\s*(.+)", words))
    }
    bad = [f"NPU {device}: {status.strip()}" for device, status in answers.items() if status.strip() != "Success"]
    if bad:
        return warning("net health", ", ".join(bad), "Compare hccn_tool -i N -netdetect -g, -gateway -g and -ip -g.")
    if len(answers) < len(devices) or not answers:
        return note("net health", "not known of each NPU", "Look on the host: hccn_tool -i N -net_health -g.")
    return good("net health", "Success on each NPU")


def super_pod(root: Path, run: RunCommand = _run) -> Check:
    """Say in which super pod (Atlas A3) this host is: HCCS does not leave it."""
    tool = _tool(root, SMI)
    if not tool:
        return note("super pod", "npu-smi is not here", "On Atlas A3 compare npu-smi info -t spod-info -i 0 -c 0.")
    said = run([tool, "info", "-t", "spod-info", "-i", "0", "-c", "0"])
    pod, server = (re.search(rf"{name}\s*:\s*(\d+)", said) for name in ("Super Pod ID", "Server Index"))
    if "does not support" in said:
        return good("super pod", "none: these NPUs have no HCCS between hosts")
    if not pod or not server:
        words = " ".join(said.split())[:120] or "nothing"
        return note(
            "super pod", f"npu-smi says: {words}", "On Atlas A3 compare npu-smi info -t spod-info on the hosts."
        )
    return good(
        "super pod", f"{pod[1]}, server {server[1]} of it: P and D want one pod, and each host a server of its own"
    )


def tls(root: Path, devices: list[int], run: RunCommand = _run) -> Check:
    """Check that the NPUs have one TLS switch: vllm-ascend's guides want it alike on all hosts."""
    tool = _tool(root)
    said = {device: run([tool, "-i", str(device), "-tls", "-g"]) for device in devices} if tool else {}
    switches = {device: match[1] for device, words in said.items() if (match := re.search(r"switch\D{0,3}(\d)", words))}
    remedy = "Make it the same on all NPUs of all hosts (hccn_tool -tls)."
    if not switches:
        return note("tls", "the NPUs' TLS switch is not known", "Compare it: hccn_tool -i N -tls -g, on each host.")
    if len(set(switches.values())) > 1:
        return failure("tls", ", ".join(f"NPU {device}: {value}" for device, value in switches.items()), remedy)
    return good("tls", f"switch {switches.popitem()[1]} on each NPU here, as it must be on the other hosts")


def environment(options: HostOptions) -> Iterator[Check]:
    environ, budget = options.environ, options.push.wire.transfer_timeout_s
    try:
        needed = 2 * sum(ascend_timeouts(environ, budget)) / 1000
    except ConfigError as problem:
        yield failure("environment", problem.sentence, problem.remedy)
        return
    if environ.get("ASCEND_BUFFER_POOL") and environ.get("ASCEND_USE_ASYNC_TRANSFER"):
        yield failure(
            "environment", "ASCEND_BUFFER_POOL and ASCEND_USE_ASYNC_TRANSFER exclude each other", "Unset both."
        )
    else:
        yield good("environment", f"Mooncake's timeouts end after {needed:g} s of {budget:g} s")


def network(environ: Mapping[str, str], interfaces: tuple[str, ...]) -> Check:
    """Check the network that HCCL and gloo are told to take: interfaces, or how their names begin, and an address."""
    remedy = "examples/ascend.env has the four variables; on each host they are its own."
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        wanted = [word.strip().lstrip("=") for word in environ.get(name, "").split(",") if word.strip()]
        if wanted and wanted[0][0] != "^" and not any(has.startswith(tuple(wanted)) for has in interfaces):
            return failure("network", f"{name} = {environ[name]}, but there are {', '.join(interfaces)}", remedy)
    if address := environ.get("HCCL_IF_IP"):
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.bind((address, 0))
        except OSError as problem:
            return failure("network", f"HCCL_IF_IP = {address} is no address of this host: {problem.strerror}", remedy)
        return good("network", f"HCCL takes that of {address}")
    several = [name for name in interfaces if name != "lo"]
    if len(several) > 1 and not environ.get("HCCL_SOCKET_IFNAME"):
        says = f"HCCL and gloo take the first that they find of {', '.join(several)}"
        return note("network", says, f"An engine over several hosts may hang so. {remedy}")
    return good("network", "HCCL and gloo have no other to take")
