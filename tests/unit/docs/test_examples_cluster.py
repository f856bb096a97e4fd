# SPDX-License-Identifier: Apache-2.0
"""The cluster's example beyond its schemas: what Kustomize builds, who finds whom, the alerts, and the images."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.docs.promql import ScrapedPage, Scrapes, evaluate
from tools.recipes import RECIPES, commands
from unit.docs.manifests import EXAMPLES, ROOT, container_of, documents, wrong
from vllm_ascend_pd import __version__

BASE = EXAMPLES / "kubernetes" / "base"
OVERLAYS = sorted((EXAMPLES / "kubernetes" / "overlays").iterdir())
IMAGES = sorted((EXAMPLES / "docker").glob("*.Dockerfile"))
ALL = [document for path in sorted(BASE.glob("*.yaml")) if path.stem != "kustomization" for document in documents(path)]


def the(kind: str, name: str) -> dict[str, Any]:
    (document,) = [each for each in ALL if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return document


def test_the_base_lists_each_manifest_once() -> None:
    (listed,) = documents(BASE / "kustomization.yaml")
    assert sorted(listed["resources"]) == sorted(
        path.name for path in BASE.glob("*.yaml") if path.stem != "kustomization"
    )
    keys = [(each["kind"], each["metadata"]["name"]) for each in ALL]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_what_kustomize_builds_of_an_overlay_fits_the_schemas(overlay: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed here")
    done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    built = [each for each in yaml.safe_load_all(done.stdout) if each]
    assert len(built) == len(ALL)
    for each in built:
        assert wrong(each, overlay.name) == []
        assert each["metadata"]["namespace"] == "pd"
    engines = [container_of(each) for each in built if each["kind"] == "LeaderWorkerSet"]
    (sizes,) = [each["data"] for each in built if each["metadata"]["name"] == "pd-sizes"]
    for engine in engines:
        npus = engine["resources"]["limits"]["huawei.com/Ascend910"]
        assert sizes["TENSOR_PARALLEL"] == npus and engine["image"].endswith("-a3") == (npus == "16")


def test_each_replica_of_the_metaserver_has_a_name_that_every_decode_engine_lists() -> None:
    front = the("StatefulSet", "pd-metaserver")
    words = shlex.split(container_of(front)["args"][-1])
    advertised = words[words.index("--advertise-host") + 1]
    assert advertised == f"$(POD_NAME).{front['spec']['serviceName']}"
    port = words[words.index("--worker-port") + 1]
    names = [f"pd-metaserver-{n}.{front['spec']['serviceName']}" for n in range(front["spec"]["replicas"])]
    service = the("Service", front["spec"]["serviceName"])["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True and len(names) >= 2
    for path in (BASE / "decode.yaml", EXAMPLES / "large-ep" / "decode.yaml"):
        command = shlex.split(container_of(documents(path)[0])["args"][-1].partition("exec ")[2])
        keys = json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
        assert keys["metaserver_urls"] == [f"http://{name}:{port}" for name in names], path


@pytest.mark.parametrize("folder", ["kubernetes/base", "large-ep"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_metaserver_finds_the_engines_by_their_service_and_may_watch_it(role: str, folder: str) -> None:
    words = shlex.split(container_of(the("StatefulSet", "pd-metaserver"))["args"][-1])
    service = the("Service", words[words.index(f"--{role}-service") + 1])["spec"]
    engine = documents(EXAMPLES / folder / f"{role}.yaml")[0]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert service["selector"].items() <= engine["metadata"]["labels"].items()
    (port,) = service["ports"]
    (container,) = engine["spec"]["containers"]
    named = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert named[port["targetPort"]] == port["port"]
    assert "readinessProbe" in container, "else a pod is ready before its engine answers"
    (rule,) = the("Role", "pd-metaserver")["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }
    (subject,) = the("RoleBinding", "pd-metaserver")["subjects"]
    account = the("StatefulSet", "pd-metaserver")["spec"]["template"]["spec"]["serviceAccountName"]
    (namespace,) = {documents(overlay / "kustomization.yaml")[0]["namespace"] for overlay in OVERLAYS}
    assert subject == {"kind": "ServiceAccount", "name": account, "namespace": namespace}, (
        "an API server wants all three"
    )


def test_engines_for_experts_have_the_sizes_of_their_recipe_and_all_of_them_are_built() -> None:
    """Sizes that follow from the number of hosts are the manifests' own: a recipe has one server for all hosts of D."""
    (recipe,) = [one for one in RECIPES if one.title == "DeepSeek-V3.1"]
    prefill, decode, *_ = commands(recipe)
    for role, command in (("prefill", prefill), ("decode", decode)):
        (engines,) = documents(EXAMPLES / "large-ep" / f"{role}.yaml")
        said = container_of(engines)["args"][-1]
        flags, wanted = (_flags(shlex.split(text.replace("\\\n", " "))) for text in (said, command))
        apart = {name for name in wanted if name.startswith("--data-parallel-size-local")}
        for name in wanted.keys() - apart - {"--port", "--kv-transfer-config", "--data-parallel-address"}:
            assert flags.get(name) == wanted[name], (role, name)
        assert flags["--data-parallel-size"] == wanted["--data-parallel-size"]
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed here")
    done = subprocess.run(
        ["kubectl", "kustomize", EXAMPLES / "large-ep"], capture_output=True, text=True, timeout=120, check=True
    )
    built = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout) if each}
    assert len(built) == len(ALL)
    for role in ("prefill", "decode"):
        (engines,) = documents(EXAMPLES / "large-ep" / f"{role}.yaml")
        assert built["LeaderWorkerSet", f"pd-{role}"]["spec"] == engines["spec"], "nothing of the base is left in it"
        group = engines["spec"]["leaderWorkerTemplate"]["size"]
        kept = built["PodDisruptionBudget", f"pd-{role}"]["spec"]["minAvailable"]
        assert kept % group == 0, "an eviction of one pod ends its group"


def _flags(words: list[str]) -> dict[str, str]:
    """Flags of a command line with their values; of one without, an empty one."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def test_no_service_takes_the_name_that_a_leaderworkerset_needs_for_its_own() -> None:
    """It makes a headless Service of its name, for pods that are not ready, only where there is none: with another one
    in that place the pods of a group do not find their first one."""
    named: dict[str, set[str]] = {"Service": set(), "LeaderWorkerSet": set()}
    for each in (one for path in sorted(EXAMPLES.glob("**/*.yaml")) for one in documents(path)):
        named.get(each.get("kind", ""), set()).add(each.get("metadata", {}).get("name", ""))
    assert named["Service"] and named["LeaderWorkerSet"] and not named["Service"] & named["LeaderWorkerSet"]


def test_alerts_ask_for_metrics_that_there_are() -> None:
    known = set(" ".join(json.loads((ROOT / "tests/unit/public_names.json").read_text())["metrics"]).split())
    (group,) = the("PrometheusRule", "pd")["spec"]["groups"]
    for rule in group["rules"]:
        asked = re.findall(r"(?:vllm:)?ascend_pd_\w+", rule["expr"])
        assert asked, rule
        for name in asked:
            assert name in known or name.removesuffix("_total") in known, rule["alert"]


@pytest.mark.parametrize(("alert", "role"), [("NoUsablePrefill", "prefill"), ("NoUsableDecode", "decode")])
def test_that_no_engine_is_usable_is_seen_also_when_the_last_one_is_forgotten(alert: str, role: str) -> None:
    """A metaserver that has lost all pods of a role has no series of them: then a comparison finds nothing."""
    (expression,) = [
        rule["expr"] for rule in the("PrometheusRule", "pd")["spec"]["groups"][0]["rules"] if rule["alert"] == alert
    ]
    here = {"namespace": "pd", "pod": "pd-metaserver-0"}

    def fires(**up: int) -> bool:
        lines = [f'ascend_pd_metaserver_instance_up{{role="{role}",engine="{name}"}} {n}' for name, n in up.items()]
        page = "\n".join(["ascend_pd_metaserver_ready 0", *lines, ""])
        return bool(evaluate(expression, Scrapes([ScrapedPage(60, here, page)]), 60))

    assert not fires(a=1, b=0) and fires(a=0, b=0) and fires()


@pytest.mark.parametrize(
    ("alert", "good", "bad"),
    [
        ("NoPairProven", "ascend_pd_metaserver_ready 1", "ascend_pd_metaserver_ready 0"),
        ("LoadsFail", *(f'ascend_pd_metaserver_loads_total{{prefill="p",end="{end}"}} %d' for end in ("received", "PD-SEC-003"))),
        ("WriterDead", *(f"vllm:ascend_pd_writers_dead {count}" for count in (0, 1))),
    ],
)  # fmt: skip
def test_an_alert_of_the_cluster_fires_on_its_metric_alone(alert: str, good: str, bad: str) -> None:
    rules = the("PrometheusRule", "pd")["spec"]["groups"][0]["rules"]
    (expression,) = [rule["expr"] for rule in rules if rule["alert"] == alert]

    def fires(line: str) -> bool:
        pages = [ScrapedPage(at, {"namespace": "pd", "pod": "x"}, f"{line.replace('%d', str(at))}\n") for at in (0, 60)]
        return bool(evaluate(expression, Scrapes(pages), 60))

    assert fires(bad) and not fires(good)


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_installs_the_wheel_of_this_version_with_an_extra_that_it_has(path: Path) -> None:
    lines = path.read_text().replace("\\\n", " ").splitlines()
    assert any("NEVER BUILT" in line for line in lines)
    (copied,) = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    given = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if line.startswith("ARG "))
    assert copied == ["${WHEELS}/vllm_ascend_pd-*.whl", "/tmp/wheels/"] and given["WHEELS"] == "dist"
    (command,) = [line for line in lines if line.startswith("RUN ")]
    words = shlex.split(command.removeprefix("RUN ").partition("&&")[0])
    assert words[:2] == ["pip", "install"] and words[words.index("--find-links") + 1] == copied[1].rstrip("/")
    (name,) = [word for word in words if word.startswith("vllm-ascend-pd")]
    wanted = re.fullmatch(r"vllm-ascend-pd(?:\[(\w+)\])?==(.+)", name)
    assert wanted and wanted[2] == __version__
    project = (ROOT / "pyproject.toml").read_text()
    assert 'name = "vllm-ascend-pd"' in project
    assert wanted[1] is None or re.search(rf"^{wanted[1]} = \[", project, re.MULTILINE)


def test_the_metaservers_pod_runs_the_image_that_is_built_for_it_as_its_user() -> None:
    text = (EXAMPLES / "docker" / "metaserver.Dockerfile").read_text()
    pod = the("StatefulSet", "pd-metaserver")["spec"]["template"]["spec"]
    assert f"-t {pod['containers'][0]['image']} ." in text
    context = pod["securityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in text and context["runAsNonRoot"] is True
    assert context["fsGroup"] == context["runAsGroup"], "its secrets are 0440, which only the process's group may be"
