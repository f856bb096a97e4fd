# SPDX-License-Identifier: Apache-2.0
"""The examples as far as a machine without NPUs and without a cluster can check them: flags, keys, ports, schemas."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from unit.docs.manifests import EXAMPLES, ROOT, SCHEMAS, containers_of, documents, wrong
from unit.kits.watching import until
from vllm_ascend_pd.cli.__main__ import parser
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.router.command import settings_of

MANIFESTS = sorted(
    path
    for folder in ("gateway", "kubernetes/base", "large-ep")
    for path in (EXAMPLES / folder).glob("*.yaml")
    if path.stem != "kustomization"
)
PREFILL_HOSTS, DECODE_HOSTS = [f"10.0.1.{n}" for n in range(4)], [f"10.0.2.{n}" for n in range(2)]
HOSTS = {
    "PREFILL_HOST": "10.0.0.1",
    "DECODE_HOST": "10.0.0.2",
    "PREFILL_HOSTS": " ".join(PREFILL_HOSTS),
    "DECODE_HOSTS": " ".join(DECODE_HOSTS),
}
SCRIPTS = [
    ("1p1d/run.sh", ["--model", "m"]),
    ("2p2d/run.sh", ["--model", "m"]),
    ("unequal-tp/gqa.sh", ["--model", "m"]),
    ("unequal-tp/mla.sh", ["--model", "m"]),
    ("two-hosts/prefill.sh", ["--model", "m"]),
    ("two-hosts/decode.sh", ["--model", "m"]),
    ("two-hosts/metaserver.sh", []),
    *(("large-ep/prefill.sh", [node, "--model", "m"]) for node in "03"),
    *(("large-ep/decode.sh", [node, "--model", "m"]) for node in "01"),
    ("large-ep/metaserver.sh", []),
]
TAKEN = range(20000, 36000)  # by Mooncake's ascend transport
TOKENS = tempfile.NamedTemporaryFile()  # noqa: SIM115  # in place of each token file; mode 0600, deleted at the end
TOKENS.write(b"a-word-of-sixteen-characters")
TOKENS.flush()
OWN_IMAGE = "vllm-ascend-pd-metaserver:0.1.0"  # examples/docker
IMAGE = "quay.io/ascend/vllm-ascend:v0.30.0rc2"  # for Atlas A2; A3 has its own tag


def dry(script: str, words: list[str], **variables: str) -> list[list[str]]:
    """Return the command lines that a script would run."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PD_")} | HOSTS | variables
    made = subprocess.run(
        [EXAMPLES / script, *words, "--dry-run"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return [shlex.split(line) for line in made.stdout.splitlines()]


def commands_of_containers() -> Iterator[tuple[str, str]]:
    """Shell commands of containers, with their places."""
    for name, service in documents(EXAMPLES / "docker-compose" / "compose.yaml")[0]["services"].items():
        yield f"compose {name}", service["command"][-1]
    for path in MANIFESTS:
        for document in documents(path):
            for container in containers_of(document):
                yield f"{_name(path)} {container['name']}", container["args"][-1]


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def check(words: list[str], where: str) -> None:
    """Check one of our command lines: the flags exist, the configuration is accepted, ports are outside Mooncake's
    range."""
    if "--kv-transfer-config" in words:
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert config["kv_connector"] == "AscendPushConnector", where
        keys = config["kv_connector_extra_config"]
        push = PushConfig.parse(keys)
        assert not push.ignored, where
        assert push.channel.side_channel_port not in TAKEN, where
        assert (config["kv_role"] == "kv_consumer") == bool(push.metaserver.metaserver_urls), where
    elif started := {"metaserver", "sidecar"}.intersection(words):
        start = words.index(started.pop())
        arguments = [TOKENS.name if word.startswith("/run/secrets") else word for word in words[start:]]
        arguments = [word.replace("$(POD_NAME)", "pd-metaserver-0") for word in arguments]
        words = [*words, "--port", str(settings_of(parser().parse_args(arguments)).port)]
    else:
        raise AssertionError(f"{where}: {words}")
    ports = [int(words[i + 1]) for i, word in enumerate(words) if word.endswith("-port") or word == "--port"]
    assert ports and all(port not in TAKEN for port in ports), where


@pytest.mark.parametrize(
    ("script", "words"), SCRIPTS, ids=[" ".join((script, *words[:1])) for script, words in SCRIPTS]
)
def test_a_script_starts_what_our_commands_accept(script: str, words: list[str]) -> None:
    commands = dry(script, words)
    assert commands
    for command in commands:
        check(command, script)


def test_a_scripts_engines_have_ports_of_their_own_and_the_metaserver_names_them() -> None:
    for script, words in SCRIPTS[:4]:
        first, *engines = dry(script, words)
        ports = [engine[engine.index("--port") + 1] for engine in engines]
        assert len(ports) == len(set(ports))
        named = re.findall(r"http://127\.0\.0\.1:(\d+)", " ".join(first))
        assert sorted(named) == sorted(ports), script


def test_a_second_signal_leaves_no_engine_behind(tmp_path: Path) -> None:
    """The first one asks the engines to end, and these do not. They write a file when they hear it."""
    folder, heard = tmp_path / "examples/2p2d", tmp_path / "heard"
    folder.mkdir(parents=True)
    heard.mkdir()
    shutil.copy(EXAMPLES / "2p2d/run.sh", folder)
    for name in ("ascend.env", "environment.sh"):
        shutil.copy(EXAMPLES / name, folder.parent)
    (tmp_path / "scripts").mkdir()
    for role in ("metaserver", "prefill", "decode"):
        script = tmp_path / "scripts" / f"{role}.sh"
        script.write_text(f"#!/bin/sh\ntrap ': >{heard}/$$.TERM' TERM\n: >{heard}/$$.on\nwhile :; do sleep 0.1; done\n")
        script.chmod(0o755)

    def all_five(state: str) -> bool:
        return len(list(heard.glob(f"*.{state}"))) == 5

    run = subprocess.Popen([folder / "run.sh", "--model", "m"])
    try:
        for state in ("on", "TERM"):
            until(functools.partial(all_five, state), state)
            run.send_signal(signal.SIGTERM)
        assert run.wait(20) == 130
        assert not [file for file in heard.glob("*.on") if Path("/proc", file.stem).exists()]
    finally:
        run.kill()
        run.wait()
        for file in heard.glob("*.on"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(file.stem), signal.SIGKILL)


def test_unequal_sizes_are_unequal_and_not_configured_twice() -> None:
    for script, sizes in (("unequal-tp/gqa.sh", ["4", "2"]), ("unequal-tp/mla.sh", ["2", "1"])):
        _, *engines = dry(script, ["--model", "m"])
        assert [engine[engine.index("--tensor-parallel-size") + 1] for engine in engines] == sizes
        assert "tp_size" not in str(engines)


def test_the_commands_for_ones_own_engines_are_accepted_and_find_each_other() -> None:
    page = "docs/start.md"
    text = (ROOT / page).read_text()
    (block,) = (part for part in text.split("```") if "serve MODEL --port" in part)
    words = shlex.split(block, comments=True)
    starts = [i for i, word in enumerate(words) if word in ("vllm", "vllm-ascend-pd", "curl")]
    prefill, decode, front = (words[a:b] for a, b in itertools.pairwise(starts))
    for command, where in ((prefill, "P_HOST"), (decode, "D_HOST"), (front, "META_HOST")):
        check(command, f"{page}: {where}")
    for command, host in ((prefill, "P_HOST"), (decode, "D_HOST")):
        assert f"http://{host}:{command[command.index('--port') + 1]}" in front
        assert f"VLLM_HOST_IP={host}" in words and '"secret_file"' in " ".join(command)
    request = words[starts[-1] :]
    assert request[1] == f"http://META_HOST:{front[front.index('--port') + 1]}/v1/completions"
    assert json.loads(request[request.index("-d") + 1])["model"] == "MODEL"


@pytest.mark.parametrize(("where", "command"), list(commands_of_containers()), ids=lambda value: value[:24])
def test_a_container_starts_what_our_commands_accept(where: str, command: str) -> None:
    installed, _, started = command.partition("exec ")
    assert "pip install --no-deps" in installed or "metaserver.yaml" in where  # it has an image of its own
    check(shlex.split(started), where)


def test_engines_want_a_key_which_their_metaserver_lends_to_clients_with_one_of_their_own() -> None:
    commands = dict(commands_of_containers())
    for where in ("compose metaserver", "base/metaserver.yaml metaserver"):
        assert "--lend-engine-token" in commands[where] and "--client-token-file" in commands[where]
    for where in ("compose prefill", "compose decode"):
        assert 'VLLM_API_KEY="$$(cat /run/secrets/engine-token)"' in commands[where]
    key = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "pd-secret", "key": "engine-token"}}}
    engines = [path for path in MANIFESTS if path.parent.name != "gateway" and path.stem in ("prefill", "decode")]
    assert len(engines) == 4
    for path in engines:
        (container,) = (each for document in documents(path) for each in containers_of(document))
        assert key in container["env"], path


def test_an_engine_has_time_to_finish_its_answers_and_the_container_waits_for_it() -> None:
    """With vLLM's default, 0, SIGTERM cuts answers off, however long the container would wait."""
    graces = {
        f"compose {name}": int(service["stop_grace_period"].removesuffix("s"))
        for name, service in documents(EXAMPLES / "docker-compose" / "compose.yaml")[0]["services"].items()
    }
    for path in MANIFESTS:
        for document in documents(path):
            for container in containers_of(document):
                graces[f"{_name(path)} {container['name']}"] = _pod(document)["terminationGracePeriodSeconds"]
    engines = {where: shlex.split(command) for where, command in commands_of_containers() if "vllm serve" in command}
    assert len(engines) == 8
    for where, words in engines.items():
        timeout_s = int(words[words.index("--shutdown-timeout") + 1])
        assert 30 <= timeout_s <= graces[where] - 20, where


def test_every_container_and_the_npu_job_use_one_release_in_the_image_of_their_chip() -> None:
    paths = [*MANIFESTS, EXAMPLES / "docker-compose" / "compose.yaml", ROOT / ".github" / "workflows" / "npu.yml"]
    for path in paths:
        text = path.read_text()
        chip = "-a3" if re.search(r'Ascend910: "16"', text) else ""  # a host of Atlas A3 has 16
        images = re.findall(r"image: (\S+)", text)
        assert set(images) <= {IMAGE + chip, OWN_IMAGE} and (images or path.name in ("monitoring.yaml", "pool.yaml")), (
            path
        )


def test_engines_for_experts_have_buffers_by_role_and_what_is_exported_stays(tmp_path: Path) -> None:
    """The scripts' last step is replaced by `env`: it prints what an engine would get."""
    (tmp_path / "examples").mkdir()
    for name in ("large-ep", "two-hosts"):
        shutil.copytree(EXAMPLES / name, tmp_path / "examples" / name)
    for name in ("ascend.env", "environment.sh"):
        shutil.copy(EXAMPLES / name, tmp_path / "examples")
    (tmp_path / "scripts").mkdir()
    for role in ("prefill", "decode"):
        (tmp_path / "scripts" / f"{role}.sh").write_text("#!/bin/sh\nexec env\n")
        (tmp_path / "scripts" / f"{role}.sh").chmod(0o755)

    def environment(script: str, *words: str, **given: str) -> dict[str, str]:
        command = [tmp_path / "examples" / script, *words]
        bare = {"PATH": os.environ["PATH"], "PREFILL_HOSTS": "127.0.0.1", "DECODE_HOSTS": "127.0.0.1"}
        said = subprocess.run(command, env=bare | given, capture_output=True, text=True, timeout=60, check=True)
        return dict(line.split("=", 1) for line in said.stdout.splitlines() if "=" in line)

    prefill, decode = environment("large-ep/prefill.sh", "0"), environment("large-ep/decode.sh", "0")
    assert prefill.items() >= settings().items()
    assert 600 <= int(decode["HCCL_BUFFSIZE"]) <= 1100 and prefill["HCCL_BUFFSIZE"] == settings()["HCCL_BUFFSIZE"]
    of_loopback = dict.fromkeys(("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "lo")
    assert decode.items() >= (of_loopback | {"HCCL_IF_IP": "127.0.0.1"}).items()
    exported = {"HCCL_BUFFSIZE": "777", "ASCEND_BASE_PORT": "21000", "GLOO_SOCKET_IFNAME": "data0"}
    for script in ("large-ep/prefill.sh", "large-ep/decode.sh"):
        assert environment(script, "0", **exported).items() >= exported.items()
    elsewhere = environment("two-hosts/decode.sh", DECODE_HOST="198.51.100.7")
    assert "HCCL_IF_IP" not in elsewhere, "no address of another host"
    named = environment("large-ep/decode.sh", "0", DECODE_HOSTS="localhost")
    assert named["HCCL_IF_IP"] == "127.0.0.1", "HCCL takes no name"
    documented = (EXAMPLES / "ascend.env").read_text()
    assert all(f"# {name}=" in documented for name in ("HCCL_IF_IP", *of_loopback))


def test_hosts_can_be_named_and_the_metaserver_and_d_call_each_other_by_the_same_address() -> None:
    named = {"PREFILL_HOSTS": "localhost", "DECODE_HOSTS": "localhost"}
    (decode,), (front,) = (
        dry("large-ep/decode.sh", ["0", "--model", "m"], **named),
        dry("large-ep/metaserver.sh", [], **named),
    )
    (prefill,) = dry("two-hosts/prefill.sh", ["--model", "m"], PREFILL_HOST="localhost")
    flags = dict(itertools.pairwise(front))
    assert flags["--host"] == "127.0.0.1" and flags["--decode"] == "http://127.0.0.1:8002"
    assert json.loads(dict(itertools.pairwise(decode))["--kv-transfer-config"])["kv_connector_extra_config"][
        "metaserver_urls"
    ] == ["http://127.0.0.1:8000"]
    assert dict(itertools.pairwise(prefill))["--host"] == "127.0.0.1"
    said = subprocess.run([EXAMPLES / "large-ep/metaserver.sh", "--dry-run"], env={**os.environ, **HOSTS, "PREFILL_HOSTS": "a.invalid"},
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert said.returncode == 2 and said.stderr.startswith("a.invalid: no address")


def test_the_firewall_knows_the_servers_of_all_engines_here() -> None:
    (line,) = re.findall(r"^define servers = \{ (.*) \}$", (EXAMPLES / "host-firewall.nft").read_text(), re.MULTILINE)
    known = {int(port) for port in line.split(", ")}
    scripts = [command for script, words in SCRIPTS[4:] for command in dry(script, words)]
    pages = [(ROOT / "docs" / name).read_text() for name in ("start.md", "recipes.md")]
    served = {int(port) for page in pages for port in re.findall(r"http://[PD]_HOST\w*:(\d+)", page)}
    served |= {int(dict(itertools.pairwise(words))["--port"]) for words in scripts if "--kv-transfer-config" in words}
    for where, command in commands_of_containers():
        if "vllm serve" in command and "compose" not in where and "gateway" not in where:
            served.add(int(dict(itertools.pairwise(shlex.split(command)))["--port"]))
    assert served == known


def test_a_decode_engine_is_spread_over_as_many_hosts_as_are_named() -> None:
    hosts = [f"10.0.3.{n}" for n in range(4)]
    for node in range(4):
        (words,) = dry("large-ep/decode.sh", [str(node), "--model", "m"], DECODE_HOSTS=" ".join(hosts), NPUS="8")
        flags = dict(itertools.pairwise(words))
        assert flags["--data-parallel-size"] == "32" and flags["--data-parallel-size-local"] == "8"
        assert flags["--data-parallel-start-rank"] == str(node * 8) and flags["--host"] == hosts[node]
        assert flags["--data-parallel-address"] == hosts[0]


def _in_namespace(*words: str, of: int = 0) -> subprocess.CompletedProcess[str]:
    enter = ["nsenter", f"--net=/proc/{of}/ns/net"] if of else []
    return subprocess.run([*enter, *words], capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def engines_host() -> Iterator[int]:
    """A process in a network namespace of its own with the firewall: 10.0.0.1, and 10.99.0.1 on the same wire."""
    if not shutil.which("nft", path=os.environ["PATH"] + ":/usr/sbin"):
        pytest.skip("nft is not installed here")
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stderr=subprocess.PIPE, text=True)
    our_namespace = Path("/proc/self/ns/net").readlink()
    try:
        until(
            lambda: holder.poll() is not None or Path(f"/proc/{holder.pid}/ns/net").readlink() != our_namespace,
            "unshare",
        )
        if holder.poll() is not None:
            pytest.skip(
                f"this machine allows no network namespaces: {(holder.stderr.read() if holder.stderr else '').strip()}"
            )
        rules = str(EXAMPLES / "host-firewall.nft")
        for _ in range(2):  # loading it again replaces it
            loaded = _in_namespace("nft", "-f", rules, of=holder.pid)
            assert loaded.returncode == 0, loaded.stderr
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


PROBE = """
import socket, sys
for word in sys.argv[1:]:
    source, port = word.split(":")
    with socket.socket() as s:
        s.settimeout(1)
        s.bind((source, 0))
        try:
            s.connect(("10.0.0.1", int(port)))
            print("open")
        except ConnectionRefusedError:
            print("passed")
        except TimeoutError:
            print("dropped")
"""


def test_the_firewall_lets_engines_and_routers_in_and_nobody_else(engines_host: int, tmp_path: Path) -> None:
    """Nothing listens: a port that the firewall lets through refuses the connection, another one never answers."""
    peer = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    our_namespace = Path("/proc/self/ns/net").readlink()
    try:
        until(lambda: Path(f"/proc/{peer.pid}/ns/net").readlink() != our_namespace, "unshare")
        wire = ["ip", "link", "add", "w0", "type", "veth", "peer", "name", "w1", "netns", str(peer.pid)]
        steps = [(engines_host, wire), (engines_host, ["ip", "addr", "add", "10.0.0.1/8", "dev", "w0"])]
        steps += [
            (peer.pid, ["ip", "addr", "add", f"{a}/8", "dev", "w1"]) for a in ("10.0.0.2", "10.244.0.2", "10.99.0.2")
        ]
        steps += [(engines_host, ["ip", "link", "set", "w0", "up"]), (peer.pid, ["ip", "link", "set", "w1", "up"])]
        for of, words in steps:
            done = _in_namespace(*words, of=of)
            assert done.returncode == 0, done.stderr
        asked = {
            "10.0.0.2:15000": "passed", "10.0.0.2:18200": "passed", "10.0.0.2:20000": "passed", "10.0.0.2:8101": "dropped",
            "10.244.0.2:8101": "passed", "10.244.0.2:15500": "dropped", "10.244.0.2:35999": "dropped",
            "10.99.0.2:17000": "dropped", "10.99.0.2:8102": "dropped", "10.99.0.2:22": "passed",
        }  # fmt: skip
        said = _in_namespace("python3", "-c", PROBE, *asked, of=peer.pid)
        assert dict(zip(asked, said.stdout.split(), strict=True)) == asked, said.stderr
    finally:
        peer.kill()
        peer.wait()


def test_the_pools_port_is_ps_server_and_ds_sidecar_whose_d_calls_it() -> None:
    pool, picker = documents(EXAMPLES / "gateway" / "pool.yaml")
    (port,) = (one["number"] for one in pool["spec"]["targetPorts"])
    commands = {where: shlex.split(text.partition("exec ")[2]) for where, text in commands_of_containers()}
    prefill, decode, beside = (
        commands[f"gateway/{name}"] for name in ("prefill.yaml engine", "decode.yaml engine", "decode.yaml sidecar")
    )

    def flag(words: list[str], name: str) -> str:
        return words[words.index(name) + 1]

    assert flag(prefill, "--port") == flag(beside, "--port") == str(port)
    assert flag(beside, "--decode").endswith(f":{flag(decode, '--port')}")
    assert flag(beside, "--prefill-allowed").endswith(f":{port}")
    keys = json.loads(flag(decode, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert keys["metaserver_urls"] == [f"http://{flag(beside, '--advertise-host')}:{port}"]
    named = yaml.safe_load(picker["data"]["config.yaml"])
    known = {plugin["type"] for plugin in named["plugins"]}
    used = {plugin["pluginRef"] for profile in named["schedulingProfiles"] for plugin in profile["plugins"]}
    assert used <= known and [profile["name"] for profile in named["schedulingProfiles"]] == ["prefill", "decode"]


@pytest.mark.parametrize("path", MANIFESTS, ids=_name)
def test_a_manifest_fits_the_schema(path: Path) -> None:
    for document in documents(path):
        assert wrong(document, path.name) == []
        assert re.fullmatch("[a-z0-9-]+", document["metadata"]["name"])
        for container in containers_of(document):
            names = {port.get("name") for port in container.get("ports", ())}
            probes = [container[key] for key in container if key.endswith("Probe")]
            assert {probe["httpGet"]["port"] for probe in probes} <= names


def test_the_compose_file_fits_the_schema() -> None:
    (document,) = documents(EXAMPLES / "docker-compose" / "compose.yaml")
    assert wrong(document, "compose") == []
    document["services"]["decode"]["stop_grace_time"] = "60s"
    assert any("stop_grace_time" in words for words in wrong(document, "compose"))


def _pod(document: dict[str, Any]) -> Any:
    spec = document["spec"]
    return (spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"])["spec"]


@pytest.mark.parametrize(
    ("file", "kind", "spoil", "says"),
    [
        ("prefill", "LeaderWorkerSet", lambda d: _pod(d).update(hostNetwrk=True), "hostNetwrk"),
        ("prefill", "LeaderWorkerSet", lambda d: _pod(d).update(terminationGracePeriodSeconds="2m"), "'2m'"),
        ("decode", "LeaderWorkerSet", lambda d: _pod(d)["containers"][0].update(envFrom=[{"configMap": {}}]), "configMap"),
        ("decode", "LeaderWorkerSet", lambda d: d["spec"]["leaderWorkerTemplate"].update(replicas=1), "replicas"),
        ("decode", "LeaderWorkerSet", lambda d: d["spec"]["leaderWorkerTemplate"].update(restartPolicy="Never"), "Never"),
        ("decode", "LeaderWorkerSet", lambda d: d["spec"]["leaderWorkerTemplate"].update(volumeClaimTemplates=[{"spec": {"accessMode": []}}]), "accessMode"),
        ("metaserver", "StatefulSet", lambda d: d["spec"].update(updateStrategy="Recreate"), "'Recreate'"),
        ("metaserver", "StatefulSet", lambda d: d["spec"].pop("selector"), "selector"),
        ("metaserver", "StatefulSet", lambda d: d["spec"]["template"]["spec"]["volumes"][0].update(configmap={}), "configmap"),
        ("metaserver", "PodDisruptionBudget", lambda d: d["spec"].update(minAvailabel=1), "minAvailabel"),
        ("metaserver", "NetworkPolicy", lambda d: d["spec"]["ingress"][0].update(to=[]), "'to'"),
        ("metaserver", "Role", lambda d: d["rules"][0].pop("verbs"), "verbs"),
        ("monitoring", "ServiceMonitor", lambda d: d["spec"]["endpoints"][0].update(targetport=1), "targetport"),
        ("monitoring", "ServiceMonitor", lambda d: d["spec"]["endpoints"][0].update(interval="often"), "'often'"),
        ("monitoring", "PrometheusRule", lambda d: d["spec"]["groups"][0]["rules"][0].pop("expr"), "expr"),
        ("metaserver", "Service", lambda d: d["spec"]["ports"][0].update(port="http"), "'http'"),
        ("metaserver", "ConfigMap", lambda d: d["data"].update(HCCL_BUFFSIZE=256), "256"),
        ("pool", "InferencePool", lambda d: d["spec"].update(targetPort=8000), "targetPort"),
        ("pool", "InferencePool", lambda d: d["spec"]["targetPorts"].append({"number": 0}), "0 is less"),
        ("pool", "InferencePool", lambda d: d["spec"]["selector"].update(matchLabels={}), "{}"),
    ],
)  # fmt: skip
def test_the_schema_refuses_what_a_cluster_would_refuse(
    file: str, kind: str, spoil: Callable[[dict[str, Any]], Any], says: str
) -> None:
    folder = "gateway" if file == "pool" else "kubernetes/base"
    document = next(d for d in documents(EXAMPLES / folder / f"{file}.yaml") if d["kind"] == kind)
    spoil(document)
    assert any(says in words for words in wrong(document, file))


def test_the_schemas_say_where_they_are_from_and_their_licence() -> None:
    for name, schema in SCHEMAS.items():
        comment = schema["$comment"]
        assert "by hand" in comment or ("Apache-2.0" in comment and re.search(r"\d+\.\d+", comment)), name
        assert f"schemas/{name}" in (EXAMPLES / "README.md").read_text()


def test_what_a_pod_mounts_and_refers_to_is_there() -> None:
    all_documents = [document for path in MANIFESTS for document in documents(path)]
    maps = {document["metadata"]["name"] for document in all_documents if document["kind"] == "ConfigMap"}
    for document in all_documents:
        spec = document.get("spec", {})
        pod = spec.get("template") or spec.get("leaderWorkerTemplate", {}).get("workerTemplate")
        if pod is None:
            continue
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        containers = pod["spec"]["containers"]
        assert {mount["name"] for container in containers for mount in container["volumeMounts"]} == volumes
        for container in containers:
            assert {source["configMapRef"]["name"] for source in container.get("envFrom", ())} <= maps


def settings() -> dict[str, str]:
    lines = (EXAMPLES / "ascend.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_ascend_settings_are_the_same_everywhere_and_keep_their_own_rule() -> None:
    shared = settings()
    (of_the_cluster,) = [
        document["data"]
        for document in documents(EXAMPLES / "kubernetes" / "base" / "metaserver.yaml")
        if document["metadata"]["name"] == "pd-ascend"
    ]
    assert of_the_cluster == shared
    both_ms = int(shared["ASCEND_CONNECT_TIMEOUT"]) + int(shared["ASCEND_TRANSFER_TIMEOUT"])
    assert 2 * both_ms < PushConfig().wire.transfer_timeout_s * 1000
    assert int(shared["ASCEND_BASE_PORT"]) == TAKEN.start
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "npu.yml").read_text())["jobs"]["selfcheck"]
    assert {key: value for key, value in job["env"].items() if key in shared}.items() <= shared.items()


def test_workflows_run_what_is_there() -> None:
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        assert all("timeout-minutes" in job for job in jobs.values()), path.name
    assert (ROOT / ".ci" / "run").is_file()


ACTIONLINT = ROOT / ".github" / "actionlint" / "run.sh"


def actionlint(*files: Path, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [ACTIONLINT, *files], env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_actionlint_finds_nothing_in_our_workflows_and_something_in_a_broken_one(tmp_path: Path) -> None:
    code, said = actionlint()
    if code == 77:
        pytest.skip(said.strip())
    assert (code, said) == (0, "")
    workflows = ROOT / ".github" / "workflows"
    broken = [tmp_path / "npu.yml", tmp_path / "release.yml"]
    broken[0].write_text((workflows / "npu.yml").read_text().replace("matrix.npus }} NPU", "matrix.cards }} NPU"))
    broken[1].write_text((workflows / "release.yml").read_text().replace("ubuntu-24.04-arm", "ubunut-24.04-arm"))
    code, said = actionlint(*broken)
    assert code == 1 and len(said.splitlines()) == 2
    assert f"{broken[0]}:" in said and "cards" in said and f"{broken[1]}:" in said and "ubunut-24.04-arm" in said


def test_ci_runs_actionlint_and_says_why_where_it_cannot(tmp_path: Path) -> None:
    assert ".github/actionlint/run.sh" in (ROOT / ".ci" / "run").read_text()
    for tool in ("bash", "dirname", "cmp"):
        executable = shutil.which(tool)
        assert executable
        (tmp_path / tool).symlink_to(executable)
    code, said = actionlint(PATH=str(tmp_path), ACTIONLINT_DIR=str(tmp_path / "cache"))
    assert code == 77 and said.startswith("actionlint is skipped: there is no node")


def test_what_never_ran_says_so() -> None:
    for path in (*MANIFESTS, EXAMPLES / "docker-compose" / "compose.yaml"):
        assert "NEVER RUN" in path.read_text().split("apiVersion")[0], path.name
    for path in EXAMPLES.glob("*/README.md"):
        assert "**Never run" in path.read_text(), path


# -- the large engines: what each host's command line says, as vLLM reads it


def understood_by_vllm(words: list[str]) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


def of_a_script(role: str, node: int) -> Any:
    (words,) = dry(f"large-ep/{role}.sh", [str(node), "--model", "m"], PD_PYTHON="/some/python", PD_DEVICE="npu")
    return understood_by_vllm(words[words.index("serve") + 1 :])


STUBS = """
pip() { :; }
getent() { [ "$2" = leader ] && printf '%s\\n' '10.9.9.9 STREAM leader' '10.9.9.9 DGRAM'; }
exec() { printf '%s\\0' "$@"; }
"""


def of_a_pod(role: str, index: int) -> Any:
    """Return the container's command as its shell expands it, with the values that Kubernetes and LeaderWorkerSet
    set in a pod."""
    command = dict(commands_of_containers())[f"large-ep/{role}.yaml engine"].replace(
        "$(VLLM_HOST_IP)", f"10.9.9.{index}"
    )
    environment = os.environ | {"LWS_LEADER_ADDRESS": "leader", "LWS_WORKER_INDEX": str(index)}
    made = subprocess.run(
        ["bash", "-c", STUBS + command], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    words = made.stdout.split("\0")[:-1]
    assert words[:3] == ["vllm", "serve", "/model"]
    return understood_by_vllm(words[3:])


@pytest.mark.parametrize("node_of", [of_a_script, of_a_pod], ids=["scripts", "manifests"])
def test_the_hosts_of_a_large_decode_engine_have_all_its_ranks_once_and_meet_at_its_first(
    node_of: Callable[[str, int], Any],
) -> None:
    first, second = nodes = [node_of("decode", node) for node in range(2)]
    starts = [node.data_parallel_start_rank for node in nodes]
    assert [start + n for start in starts for n in range(16)] == list(range(32))
    assert {node.data_parallel_address for node in nodes} == {first.host if node_of is of_a_script else "10.9.9.9"}
    assert first.host != second.host and first.data_parallel_rpc_port == second.data_parallel_rpc_port
    for node in nodes:
        assert (node.data_parallel_size, node.data_parallel_size_local, node.tensor_parallel_size) == (32, 16, 1)
        assert node.data_parallel_hybrid_lb and node.enable_expert_parallel and not node.headless
        assert node.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"


@pytest.mark.parametrize("node_of", [of_a_script, of_a_pod], ids=["scripts", "manifests"])
def test_each_host_of_large_prefill_engines_is_one_and_uses_its_sixteen_npus(
    node_of: Callable[[str, int], Any],
) -> None:
    node = node_of("prefill", 1)
    assert (node.data_parallel_size, node.tensor_parallel_size) == (2, 8)
    assert node.enable_expert_parallel and node.enforce_eager and not node.data_parallel_start_rank


def test_the_metaserver_of_the_large_engines_names_the_server_of_each_host() -> None:
    (words,) = dry("large-ep/metaserver.sh", [])
    given = settings_of(parser().parse_args(words[words.index("metaserver") :]))
    for role, hosts in (("prefill", PREFILL_HOSTS), ("decode", DECODE_HOSTS)):
        named = given.prefill if role == "prefill" else given.decode
        assert list(named) == [f"http://{host}:{of_a_script(role, n).port}" for n, host in enumerate(hosts)]


@pytest.mark.parametrize("words", [[], ["4"], ["one"], ["--model", "m"]])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_host_without_a_right_number_starts_nothing(role: str, words: list[str]) -> None:
    done = subprocess.run(
        [EXAMPLES / "large-ep" / f"{role}.sh", *words],
        env=os.environ | HOSTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "usage:" in done.stderr and not done.stdout
