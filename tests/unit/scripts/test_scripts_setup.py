# SPDX-License-Identifier: Apache-2.0
"""scripts/setup.sh: installs once, detects when nothing is to do, names what is missing, leaves a CANN container
unchanged.

The whole set-up runs here on a small tree of its own: the same script, real venv and pip, and wheels made for the
test instead of torch and Mooncake, so that no network is needed and a run takes seconds.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BASH = shutil.which("bash")
QUIET = ("PD_", "VLLM_ASCEND_PD_", "ASCEND_", "SOC_VERSION", "PIP_", "CXX", "PYTHON", "VIRTUAL_ENV")

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the CPU environment is for Python 3.11")

# Builds the stand-in package as an editable wheel: no requirement, so that pip needs no index.
BACKEND = """
import base64, hashlib, os, zipfile
def get_requires_for_build_editable(config_settings=None): return []
get_requires_for_build_wheel = get_requires_for_build_editable
def build_editable(folder, config_settings=None, metadata_directory=None):
    root = os.path.dirname(os.path.abspath(__file__))
    if "broken" in open(root + "/csrc/schema.cpp").read():
        raise SystemExit("schema.cpp:1: error: broken on purpose")
    with open(root + "/builds", "a") as count: count.write("built\\n")
    open(root + "/vllm_ascend_pd/_C.abi3.so", "w").close()
    files = {"stand_in.pth": root + "\\n", "vllm_ascend_pd-0.dist-info/METADATA":
        "Metadata-Version: 2.1\\nName: vllm_ascend_pd\\nVersion: 0\\n", "vllm_ascend_pd-0.dist-info/WHEEL":
        "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
    name = "vllm_ascend_pd-0-0.editable-py3-none-any.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        for path, text in files.items(): wheel.writestr(path, text)
        wheel.writestr("vllm_ascend_pd-0.dist-info/RECORD", "".join(p + ",,\\n" for p in files))
    return name
def build_wheel(folder, config_settings=None, metadata_directory=None): raise SystemExit("editable only")
"""


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in contents.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", record)


class Tree:
    """A small clone with its own wheels and its own tools of the host."""

    first, first_s = "", 0.0  # output of the first set-up, and its seconds
    packages: Path  # of a python3 of the host, if it has any

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone"
        self.wheels = folder / "wheels"
        self.torch_index = folder / "torch-index"
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/setup.sh", self.root / "scripts")
        for name in ("csrc", "vllm_ascend_pd", "requirements"):
            (self.root / name).mkdir()
        self.write("csrc/schema.cpp", "// one\n")
        self.write("vllm_ascend_pd/__init__.py", "")
        self.write("requirements/cpu-py311.txt", "torch==1.0\nmooncake==1.0\n")
        self.write("requirements/test.txt", "some-test-tool==1.0\n")
        self.write("requirements/dev.txt", "some-linter==1.0\n")
        self.write("setup.py", "")
        self.write("backend.py", BACKEND)
        self.write("pyproject.toml", '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
        make_wheel(self.torch_index / "torch", "torch", "1.0", {"torch.py": ""})
        make_wheel(self.wheels, "mooncake", "1.0", {"mooncake/__init__.py": "", "mooncake/engine.py": ""})
        make_wheel(self.wheels, "some_test_tool", "1.0", {"some_test_tool.py": ""})
        make_wheel(self.wheels, "some_linter", "1.0", {"some_linter.py": ""})
        (self.torch_index / "torch/index.html").write_text('<a href="torch-1.0-py3-none-any.whl">torch</a>')
        self.host = folder / "host"  # first on PATH: this host's tools
        self.host.mkdir()
        self.tool("ldconfig", "printf '\\tlib%s.so.%s (libc6) => /x\\n' ibverbs 1 numa 1 curl 4")
        for name in ("python3", "python", "python3.10", "python3.11", "python3.12"):
            self.tool(name, f'exec {sys.executable} "$@"')

    def write(self, path: str, text: str) -> None:
        (self.root / path).write_text(text)

    def tool(self, name: str, body: str) -> None:
        (self.host / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.host / name).chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(QUIET)}
        env |= {
            "PATH": f"{self.host}:{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_CACHE_DIR": "1",
            "PIP_INDEX_URL": (self.wheels / "nothing-here").as_uri(),
            "PIP_FIND_LINKS": str(self.wheels),
            "PD_TORCH_INDEX": self.torch_index.as_uri(),
            "PD_BASE_PYTHON": sys.executable,
        }
        return env | more

    def setup(self, level: str = "run", **more: str) -> tuple[int, str]:
        done = subprocess.run(
            [self.root / "scripts/setup.sh", level],
            env=self.environment(**more),
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not done.stdout, "stdout belongs to the calling script"
        return done.returncode, done.stderr

    def bash(self, text: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run functions of the script by themselves."""
        return subprocess.run(
            [BASH, "-uc", f". '{self.root}/scripts/setup.sh'; {text}"],
            env=self.environment(**more),
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def builds(self) -> int:
        return len((self.root / "builds").read_text().splitlines())

    def has(self, module: str) -> bool:
        return bool(list((self.root / ".venv").glob(f"lib/python*/site-packages/{module}*")))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """One cold set-up, shared: its tests leave it working."""
    tree = Tree(tmp_path_factory.mktemp("installed"))
    began = time.monotonic()
    code, said = tree.setup()
    assert code == 0, said
    tree.first, tree.first_s = said, time.monotonic() - began
    return tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_cold_set_up_says_each_step_with_its_time_and_nothing_else(installed: Tree) -> None:
    lines = installed.first.splitlines()
    assert all(line.startswith("[set-up] ") for line in lines), installed.first
    steps = [line for line in lines if " … " in line]
    assert len(steps) >= 4
    assert all(line.endswith(" s") for line in steps)
    assert installed.builds() >= 1


def test_torch_comes_from_its_own_index_when_pip_does_not_find_it(installed: Tree) -> None:
    assert installed.has("torch")
    assert not list(installed.wheels.glob("torch*"))


def test_the_second_set_up_does_nothing_and_is_quick(installed: Tree) -> None:
    before = installed.builds()
    began = time.monotonic()
    code, said = installed.setup()
    took = time.monotonic() - began
    assert code == 0, said
    assert " … " not in said
    assert installed.builds() == before
    assert took < installed.first_s / 2, "it takes 0.2 s, and the first one several"


def test_a_higher_level_adds_its_tools_and_only_them(installed: Tree) -> None:
    assert not installed.has("some_linter")
    code, said = installed.setup("dev")
    assert code == 0, said
    assert installed.has("some_test_tool")
    assert installed.has("some_linter")
    assert said.count(" … ") == 1, said
    assert installed.setup("test")[1].count(" … ") == 0


def test_changed_cpp_is_built_again_and_changed_python_is_not(installed: Tree) -> None:
    before = installed.builds()
    installed.write("vllm_ascend_pd/__init__.py", "x = 1\n")
    installed.setup()
    assert installed.builds() == before
    installed.write("csrc/schema.cpp", "// two\n")
    assert installed.setup()[0] == 0
    assert installed.builds() == before + 1


def test_a_lost_extension_is_built_again(installed: Tree) -> None:
    before = installed.builds()
    (installed.root / "vllm_ascend_pd/_C.abi3.so").unlink()
    installed.setup()
    assert installed.builds() == before + 1


def test_changed_pins_are_installed(installed: Tree) -> None:
    make_wheel(installed.wheels, "mooncake", "1.1", {"mooncake/__init__.py": "", "mooncake/engine.py": ""})
    installed.write("requirements/cpu-py311.txt", "torch==1.0\nmooncake==1.1\n")
    assert installed.setup()[0] == 0
    assert installed.has("mooncake-1.1")
    assert not installed.has("mooncake-1.0")


def test_a_failed_build_shows_its_end_fails_and_is_tried_again(installed: Tree) -> None:
    installed.write("csrc/schema.cpp", "broken\n")
    for _ in range(2):
        code, said = installed.setup()
        assert code == 1
        assert "broken on purpose" in said
        assert ".cache/setup.log" in said
    installed.write("csrc/schema.cpp", "// mended\n")
    assert installed.setup()[0] == 0


def test_a_second_set_up_at_the_same_time_waits_and_builds_nothing_twice(installed: Tree) -> None:
    installed.write("csrc/schema.cpp", f"// {time.monotonic_ns()}\n")
    before = installed.builds()
    running = [
        subprocess.Popen(
            [installed.root / "scripts/setup.sh"],
            env=installed.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    said = [one.communicate(timeout=120)[1] for one in running]
    assert [one.returncode for one in running] == [0, 0, 0], said
    assert installed.builds() == before + 1
    assert sum("waiting for it" in text for text in said) >= 1


def test_an_interrupted_set_up_is_finished_by_the_next_one(installed: Tree, tree: Tree) -> None:
    # Interrupted in the middle: the venv is there, no stamp is written, Mooncake is missing.
    shutil.copytree(installed.root / ".venv", tree.root / ".venv", symlinks=True)
    shutil.rmtree(tree.root / ".venv/.stamps")
    for part in (tree.root / ".venv").glob("lib/python*/site-packages/mooncake*"):
        shutil.rmtree(part)
    code, said = tree.setup()
    assert code == 0, said
    assert tree.has("mooncake-1.0")
    assert tree.builds() == 1


# ---- Debian packages


def test_missing_libraries_are_named_to_a_user_that_cannot_install_them(tree: Tree) -> None:
    tree.tool("ldconfig", "printf '\\tlibnuma.so.1 (libc6) => /x\\n'")
    tree.tool("id", "echo 1000")
    code, said = tree.setup()
    assert code == 1
    assert "As root: apt-get install libibverbs1 libcurl4" in said
    assert not (tree.root / ".venv").exists()


def test_root_gets_the_missing_packages_installed_after_an_update_of_the_lists(tree: Tree) -> None:
    tree.tool("ldconfig", "printf '\\tlibnuma.so.1 (libc6) => /x\\n'")
    tree.tool("id", "echo 0")
    # The package lists are out of date at first, as in a fresh container.
    log = tree.host / "apt.log"
    tree.tool("apt-get", f'echo "$@" >> {log}; [ "$1" = update ] || [ "$(wc -l < {log})" -gt 1 ]')
    done = tree.bash('mkdir -p "$PD_CACHE"; pd_debian "$PD_BASE_PYTHON"')
    assert done.returncode == 0, done.stderr
    first, update, second = log.read_text().splitlines()
    assert update.startswith("update")
    assert first == second
    assert first.endswith("libibverbs1 libcurl4")
    assert all("DPkg::Lock::Timeout=900" in line for line in (first, update)), "as long as for another set-up"


def test_what_tests_use_besides_is_installed_by_root_and_named_to_everybody_else(tree: Tree) -> None:
    (tree.root / ".cache").mkdir()
    for name in ("dirname", "flock", "sed", "tail"):
        (tree.host / name).symlink_to(shutil.which(name))
    log = tree.host / "apt.log"
    tree.tool("apt-get", f'echo "$@" >> {log}')

    def tools(which: str, given: str = "") -> tuple[str, str]:
        log.write_text("")
        done = tree.bash(f"PD_GIVEN={given}; pd_test_tools {which}", PATH=str(tree.host))
        assert done.returncode == 0, done.stderr
        return log.read_text().strip().rpartition("--no-install-recommends ")[2], done.stderr

    for name in ("nginx", "nft"):  # the machine may lack them
        tree.tool(name, "")
    tree.tool("id", "echo 0")
    assert tools("")[0] == "chromium-headless-shell"
    assert tools("1")[0] == "chromium-headless-shell g++-aarch64-linux-gnu qemu-user cmake"
    for number, given in ((1000, ""), (0, "1")):  # PD_PYTHON is set: nothing is installed
        tree.tool("id", f"echo {number}")
        asked, said = tools("", given)
        assert not asked and "tests that need chromium-headless-shell will be skipped" in said
    tree.tool("apt-get", f'echo "$@" >> {log}; exit 100')
    assert "will be skipped" in tools("")[1]
    tree.tool("google-chrome", "")
    assert tools("") == ("", "")


def test_nginx_is_unpacked_and_not_installed(tree: Tree) -> None:
    (tree.root / ".cache").mkdir()
    for name in ("dirname", "flock", "sed", "tail", "rm", "mkdir", "cat", "chmod"):
        (tree.host / name).symlink_to(shutil.which(name))
    log = tree.host / "apt.log"
    log.write_text("")
    tree.tool("apt-get", f'echo "$@" >> {log}; echo > nginx_1.deb')
    unpacked = "mkdir -p usr/sbin; echo 'exit 0' > usr/sbin/nginx; chmod +x usr/sbin/nginx"
    tree.tool("dpkg-deb", f'echo dpkg-deb "$@" >> {log}; {unpacked}')

    def nginx() -> tuple[list[str], str]:
        log.write_text("")
        done = tree.bash("PD_GIVEN=; pd_nginx", PATH=str(tree.host))
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines(), done.stderr

    asked, said = nginx()
    assert [line.split()[0] for line in asked] == ["download", "dpkg-deb"] and "nginx for tests" in said
    assert asked[1].split()[1:3] == ["-x", "nginx_1.deb"]
    assert nginx() == ([], "")  # it is there
    shutil.rmtree(tree.root / ".cache" / "nginx")
    tree.tool("apt-get", "exit 100")
    assert "tests that need nginx will be skipped" in nginx()[1]
    tree.tool("nginx", "")
    assert nginx() == ([], "")


def test_a_host_without_python_3_11_is_refused_with_the_reason(tree: Tree) -> None:
    for name in ("python3", "python", "python3.10", "python3.11", "python3.12"):
        tree.tool(name, "exit 127")
    done = tree.bash("pd_missing_packages ''")
    assert done.stdout.split()[:3] == ["python3.11", "python3.11-venv", "python3.11-dev"]


# ---- hosts with an NPU


@pytest.fixture
def container(tree: Tree, tmp_path: Path) -> Tree:
    """A python3 in which torch_npu and vllm_ascend can be found, as in vllm-ascend's images."""
    packages = tmp_path / "site"
    packages.mkdir()
    for name in ("torch", "torch_npu", "vllm_ascend", "mooncake"):
        (packages / f"{name}.py").write_text("")
    tree.packages = packages
    return tree


def choose(tree: Tree, **more: str) -> subprocess.CompletedProcess[str]:
    """Return the chosen device and interpreter, without PD_BASE_PYTHON."""
    return tree.bash(
        "unset PD_BASE_PYTHON; mkdir -p $PD_CACHE; pd_choose_interpreter && echo $PD_DEVICE $PD_PYTHON", **more
    )


def test_the_interpreter_of_vllm_ascend_is_used_where_there_is_one(container: Tree) -> None:
    done = choose(container, PYTHONPATH=str(container.packages))
    device, python = done.stdout.split()
    assert device == "npu"
    assert not python.startswith(str(container.root)), "no venv over a CANN container"


def test_an_npu_host_says_so_and_gets_no_venv(container: Tree) -> None:
    done = container.bash(
        'mkdir -p "$PD_CACHE"; pd_choose_interpreter; pd_npu_environment run', PYTHONPATH=str(container.packages)
    )
    assert done.returncode == 0, done.stderr
    assert "in which vllm-ascend imports; no .venv is made" in done.stderr
    assert not (container.root / ".venv").exists()


def test_vllm_ascend_that_does_not_import_stops_the_set_up_with_the_remedy(container: Tree) -> None:
    (container.packages / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    code, said = container.setup(PYTHONPATH=str(container.packages))
    assert code == 1
    assert "libhccl.so" in said
    assert "set_env.sh" in said
    assert not (container.root / ".venv").exists()


def test_a_cpu_environment_can_be_demanded_in_a_container(container: Tree) -> None:
    done = choose(container, PYTHONPATH=str(container.packages), VLLM_ASCEND_PD_NPU="0")
    assert done.stdout.split() == ["cpu", str(container.root / ".venv/bin/python")]


@pytest.mark.parametrize("host", [{"ASCEND_HOME_PATH": "/usr/local/Ascend"}, {"VLLM_ASCEND_PD_NPU": "1"}])
def test_cann_without_vllm_ascend_is_refused_instead_of_covered_by_a_venv(tree: Tree, host: dict[str, str]) -> None:
    code, said = tree.setup(**host)
    assert code == 1
    assert "no python3 here has torch_npu and vllm_ascend" in said
    assert not (tree.root / ".venv").exists()


def test_an_interpreter_that_is_given_is_used_as_it_is(tree: Tree) -> None:
    done = tree.bash("pd_setup dev && echo $PD_DEVICE $PD_PYTHON", PD_PYTHON=sys.executable)
    assert done.stdout.split() == ["cpu", sys.executable]
    assert not (tree.root / ".venv").exists()
