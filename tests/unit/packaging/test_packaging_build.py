# SPDX-License-Identifier: Apache-2.0
"""`pip install .`: finds the installed torch without importing it, names what is missing, builds one abi3 wheel.

That wheel serves on a host without torch too, for the router and the commands of operators.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.support.process import free_port
from unit.cli.published import written
from unit.router.command import running
from vllm_ascend_pd import __version__
from vllm_ascend_pd.cli.__main__ import SUBCOMMANDS

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")

ROOT = Path(__file__).resolve().parents[3]
BUILD_ENVIRONMENT = (
    "ASCEND_HOME_PATH",
    "SOC_VERSION",
    "VLLM_ASCEND_PD_NPU",
    "VLLM_ASCEND_PD_OPS",
    "VLLM_ASCEND_PD_TORCH",
    "GITHUB_REPOSITORY",
    "GITHUB_SERVER_URL",
    "PYTHONPATH",
)


HIDE_SITE_PACKAGES = """
import sys, sysconfig
hidden = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
sys.path[:] = [folder for folder in sys.path if folder not in hidden]
"""


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Environment that pip's build isolation sets: setuptools, without the interpreter's own packages."""
    folder = tmp_path_factory.mktemp("isolated")
    (folder / "sitecustomize.py").write_text(HIDE_SITE_PACKAGES)
    site_packages = Path(setuptools.__file__).parent.parent
    for part in ("setuptools", "_distutils_hack", f"setuptools-{setuptools.__version__}.dist-info"):
        (folder / part).symlink_to(site_packages / part)
    return folder


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter in which nothing is installed."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    return folder / "bin/python"


def copy_of_tree(folder: Path) -> Path:
    """Copy the files that a build reads to a folder, so that nothing is written into the repository."""
    copy = folder / "tree"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    for name in ("csrc", "vllm_ascend_pd"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_of_tree(tmp_path)


def build(python: str | Path, isolated: Path, tree: Path, *command: str, **environment: str) -> tuple[int, str]:
    env = {k: v for k, v in os.environ.items() if k not in BUILD_ENVIRONMENT} | environment
    done = subprocess.run(
        [python, "setup.py", *command],
        cwd=tree,
        env=env | {"PYTHONPATH": str(isolated)},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


def test_build_isolation_really_hides_torch(isolated: Path) -> None:
    """Otherwise the tests below would prove nothing."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=os.environ | {"PYTHONPATH": str(isolated)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "No module named 'torch'" in done.stderr


def test_without_torch_the_build_says_that_torch_is_missing_and_what_to_do(
    bare_python: Path, isolated: Path, tree: Path
) -> None:
    code, output = build(bare_python, isolated, tree, "build_ext", "--inplace")
    assert code != 0
    assert "torch is missing" in output
    assert "Install torch >= 2.10" in output
    assert str(bare_python.parent.parent) in output, "it should say where it looked"
    assert "Traceback" not in output


def test_a_host_of_the_commands_alone_needs_neither_torch_nor_a_compiler(
    bare_python: Path, isolated: Path, tree: Path
) -> None:
    """No wheel of an engine: this one has no ops, and says so by its name."""
    code, output = build(
        bare_python, isolated, tree, "bdist_wheel", "--dist-dir", str(tree), VLLM_ASCEND_PD_OPS="0", CXX="no-compiler"
    )
    assert code == 0, output
    (made,) = tree.glob("*.whl")
    assert made.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so")]
    code, output = build(bare_python, isolated, tree, "--version", VLLM_ASCEND_PD_OPS="no")
    assert code != 0 and "VLLM_ASCEND_PD_OPS=no is not understood" in output


def test_metadata_needs_no_torch(bare_python: Path, isolated: Path, tree: Path) -> None:
    code, output = build(bare_python, isolated, tree, "--version")
    assert code == 0, output
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", output.split()[-1])


def test_what_github_builds_has_links_that_lead_there(bare_python: Path, isolated: Path, tree: Path) -> None:
    """Elsewhere nobody knows an address, and the page is README as it is."""

    def page(**environment: str) -> str:
        code, output = build(bare_python, isolated, tree, "egg_info", **environment)
        assert code == 0, output
        return (tree / "vllm_ascend_pd.egg-info/PKG-INFO").read_text()

    readme, plain = (ROOT / "README.md").read_text(), page()
    assert plain.endswith(readme) and "\nDescription-Content-Type: text/markdown\n" in plain
    assert "Project-URL" not in plain
    github = page(GITHUB_SERVER_URL="https://github.com", GITHUB_REPOSITORY="someone/pd")
    assert "\nProject-URL: Repository, https://github.com/someone/pd\n" in github
    links, relative = re.findall(r"\]\(([^)]+)\)", github), re.findall(r"\]\((?!https?:|#)([^)]+)\)", readme)
    assert len(relative) > 20 and all(link.startswith(("https://", "http://", "#")) for link in links)
    at = f"https://github.com/someone/pd/blob/v{__version__}/"
    assert {f"{at}{link}" for link in relative if not link.endswith((".svg", ".png"))} <= set(links)
    assert f"https://github.com/someone/pd/raw/v{__version__}/docs/status.png" in links


def test_an_old_torch_is_named_with_its_version(isolated: Path, tree: Path, tmp_path: Path) -> None:
    old = tmp_path / "torch"
    old.mkdir()
    (old / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    code, output = build(sys.executable, isolated, tree, "build_ext", VLLM_ASCEND_PD_TORCH=str(old))
    assert code != 0
    assert "torch 2.9.1+cpu" in output
    assert "too old" in output


def test_a_missing_compiler_is_named(isolated: Path, tree: Path) -> None:
    code, output = build(sys.executable, isolated, tree, "build_ext", CXX="no-such-compiler")
    assert code != 0
    assert "'no-such-compiler' is missing" in output


def test_npu_kernels_that_are_demanded_fail_loudly_and_name_everything_that_is_missing(
    isolated: Path, tree: Path
) -> None:
    code, output = build(sys.executable, isolated, tree, "build_ext", VLLM_ASCEND_PD_NPU="1")
    assert code != 0
    assert "ASCEND_HOME_PATH" in output
    assert "SOC_VERSION" in output
    assert "torch_npu" in output


def test_a_misspelt_npu_choice_is_refused(isolated: Path, tree: Path) -> None:
    code, output = build(sys.executable, isolated, tree, "build_ext", VLLM_ASCEND_PD_NPU="yes")
    assert code != 0
    assert "auto, 0 or 1" in output


def test_plan_and_doctor_need_no_extra(tmp_path: Path) -> None:
    """The router's packages are hidden, as where `pip install .` was told of no extra."""
    hidden = ("torch", "vllm", "prometheus_client", "yaml", "zmq", "uvloop")
    hide = f"import sys\nfor name in {hidden}: sys.modules[name] = None\n"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        program = f"{hide}from vllm_ascend_pd.cli.__main__ import main\nsys.exit(main({list(words)}))"
        return subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )

    planned = run("plan", "--p-tp", "8", "--d-tp", "1", "--model", written(tmp_path, "DeepSeek-V3.1"))
    assert planned.returncode == 0 and "busiest decode rank" in planned.stdout, planned.stderr
    checked = run("doctor", "--metaserver-host")
    assert checked.returncode == 1 and "[metaserver]" in checked.stdout and not checked.stderr, checked.stderr


@pytest.fixture(scope="module")
def wheel(isolated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    code, output = build(sys.executable, isolated, copy_of_tree(folder), "bdist_wheel", "--dist-dir", str(folder))
    assert code == 0, output
    (made,) = folder.glob("*.whl")
    return made


def test_one_wheel_serves_every_python_from_3_10(wheel: Path) -> None:
    assert re.search(r"-cp310-abi3-linux_\w+\.whl$", wheel.name)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "vllm_ascend_pd/_C.abi3.so" in names
    assert "vllm_ascend_pd/py.typed" in names
    strays = [n for n in names if not n.startswith(("vllm_ascend_pd/", "vllm_ascend_pd-"))]
    assert not strays
    entry_points = next(n for n in names if n.endswith("entry_points.txt"))
    assert "ascend_pd = vllm_ascend_pd.plugin:register" in zipfile.ZipFile(wheel).read(entry_points).decode()


def test_the_extension_asks_torch_for_nothing_but_its_stable_c_functions(wheel: Path, tmp_path: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    library = zipfile.ZipFile(wheel).extract("vllm_ascend_pd/_C.abi3.so", tmp_path)
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True, timeout=60
    )
    wanted = [line.split()[-1] for line in listed.stdout.splitlines() if "@" not in line and line.split()[0] == "U"]
    assert wanted
    unstable = [name for name in wanted if not re.match(r"(aoti_)?torch_[a-z0-9_]+$", name)]
    assert not unstable


def closure(*names: str) -> Iterator[Distribution]:
    """Return the installed distributions that these requirements ask for, and those that they ask for."""
    seen: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        installed = distribution(wanted.name)
        yield installed
        waiting += map(Requirement, installed.requires or ())


@pytest.fixture(scope="module")
def router_host(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Environment with the wheel and what `WHEEL[metaserver]` installs: no torch, no vLLM."""
    folder = tmp_path_factory.mktemp("router_host")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["metaserver"]]
    for installed in closure(*wanted):
        for part in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site / part).symlink_to(installed.locate_file(part))
    return folder / "bin/python"


def test_a_host_of_the_router_needs_neither_torch_nor_vllm(router_host: Path, tmp_path: Path) -> None:
    """Every command starts, `plan` plans an exchange, and the doctor checks this host."""

    def run(*words: str) -> str:
        done = subprocess.run(
            [router_host, "-I", *words], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    missing = "import importlib.util as u; print([n for n in ('torch', 'vllm', 'vllm_ascend') if u.find_spec(n)])"
    assert run("-c", missing).strip() == "[]"
    command = "-m", "vllm_ascend_pd.cli"
    for name in SUBCOMMANDS:
        assert "usage:" in run(*command, name, "--help")
    sizes = "--kv-heads", "8", "--head-dim", "128", "--layers", "4", "--tokens", "4096"
    made = json.loads(run(*command, "plan", "--p-tp", "4", "--d-tp", "2", "--json", *sizes))
    assert made["mode"] == "regroup" and made["staging"]
    checks = json.loads(run(*command, "doctor", "--metaserver-host", "--ports", str(free_port()), "--json"))
    assert "ports" in json.dumps(checks)


def test_the_router_serves_there(router_host: Path) -> None:
    with running("--prefix-tokens", "64", workers=2, python=router_host) as router:
        assert router.complete("a prompt").json()["choices"]
        assert "ascend_pd_metaserver_ready" in router.http.get("/metrics").text
