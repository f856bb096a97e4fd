# SPDX-License-Identifier: Apache-2.0
"""Builds the NPU binding against the real torch_npu wheel, and the libraries that stand in for CANN beneath it.

    libascendcl, libhccl      functional stand-ins: host memory, threads as streams, shared memory between processes
    libopapi                  copies within a device
    libge_runner, …           empty but for the loader
    libvapd_kernels           aclrtlaunch_vapd_*, the kernels' source on the emulated cores
    librelease_thread         preloaded: lets torch_npu's release threads sleep
    _C_npu.so                 csrc/npu/binding.cpp, as on a machine with CANN

Symbols that torch_npu needs and no library provides become functions that stop the process with their name.

python tests/native/npu_build.py        makes the environment and builds if needed, as scripts/test.sh does
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from npu_forks import SETTINGS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "npu-native"
EMPTY = ("acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
OURS = ("acl", "Hccl", "Msprof", "rt")
COUNTED = ("-O1", "-g", "--coverage")  # the binding counts its lines: see `uncovered`


def interpreter() -> Path | None:
    """Return the Python of the environment with torch_npu, made if missing; None if another torch is installed."""
    done = subprocess.run([str(HERE / "npu_env.sh")], capture_output=True, text=True, check=False, timeout=900)
    if done.returncode == 3:
        return None
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return Path(done.stdout.strip())


def _packages(python: Path) -> dict[str, Path]:
    names = ("torch", "torch_npu")
    script = f"import importlib.util as u, json; print(json.dumps([u.find_spec(n).origin for n in {names}]))"
    done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True)
    return {name: Path(origin).parent for name, origin in zip(names, json.loads(done.stdout), strict=True)}


def symbols(library: Path, kind: str) -> set[str]:
    done = subprocess.run(["nm", "-D", kind, str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if line.split()}


def _missing(torch_npu: Path, provided: Iterable[Path]) -> list[str]:
    wanted = set()
    for library in (
        *torch_npu.glob("_C.*.so"),
        *(torch_npu / "lib" / f"lib{n}.so" for n in ("torch_npu", "tensorpipe")),
    ):
        wanted |= symbols(library, "--undefined-only")
    wanted = {name for name in wanted if name.startswith(OURS)}
    for library in provided:
        wanted -= symbols(library, "--defined-only")
    return sorted(wanted)


def stubs(names: Sequence[str]) -> str:
    lines = [
        "#include <stdio.h>",
        "#include <stdlib.h>",
        'static void stop(const char* name) { fprintf(stderr, "no stand-in for %s\\n", name); _Exit(72); }',
    ]
    lines += [f'void {name}(void) {{ stop("{name}"); }}' for name in names]
    return "\n".join(lines) + "\n"


def _inside_functions(source: str) -> set[int]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}


BuildT = TypeVar("BuildT", bound="Build")


class Build:
    """One set of libraries, in a folder named by a hash of its inputs."""

    sources: tuple[Path, ...] = (HERE, ROOT / "csrc")
    binding_flags: tuple[str, ...] = COUNTED

    def __init__(self, python: Path) -> None:
        self.python = python
        self._packages = _packages(python)
        self.folder = CACHE / self._fingerprint()

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(str(self.python).encode())
        versions = [(self._packages[name] / "version.py").read_bytes() for name in ("torch", "torch_npu")]
        sources = [p for folder in self.sources for p in sorted(folder.rglob("*")) if p.suffix in (".h", ".cpp")]
        for part in (*versions, *(path.read_bytes() for path in sources), Path(__file__).read_bytes()):
            digest.update(part)
        return digest.hexdigest()[:16]

    @property
    def binding(self) -> Path:
        return self.folder / "_C_npu.so"

    @property
    def preloaded(self) -> Path:
        return self.folder / "librelease_thread.so"

    def environment(self) -> dict[str, str]:
        """Return the variables with which a process imports torch_npu over the stand-ins."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
        env["LD_LIBRARY_PATH"] = f"{self.folder}:{env.get('LD_LIBRARY_PATH', '')}"
        env["LD_PRELOAD"] = str(self.preloaded)
        env["PYTHONPATH"] = f"{ROOT}:{HERE}"
        env["VLLM_ASCEND_PD_NPU_LIBRARY"] = str(self.binding)
        env["OMP_NUM_THREADS"] = "1"
        env["STAND_INS"] = "1"
        env["PYTHONWARNINGS"] = "ignore"
        env[SETTINGS] = str(self._settings())
        return env

    def command(self, module: str, *arguments: str) -> list[str]:
        return [str(self.python), "-m", module, *arguments]

    def _settings(self) -> Path:
        path, package = self.folder / "coverage.ini", ROOT / "vllm_ascend_pd"
        path.write_text(
            f"[run]\nparallel = true\ndata_file = {self.folder}/lines\nconcurrency = thread\n"
            f"source = \n  {package}/device\n  {package}/regroup\n"
        )
        return path

    def setup_py(self, folder: Path) -> Path:
        """Build the library with setup.py and CMakeLists.txt over a CANN whose kernel compiler is the emulation."""
        environment = self.environment() | {
            "ASCEND_HOME_PATH": str(HERE / "stand_ins/cann"),
            "SOC_VERSION": "ascend910b1",
            "STAND_IN_LIBRARIES": str(self.folder),
            "VLLM_ASCEND_PD_NPU": "1",
        }
        command = [
            str(self.python),
            "setup.py",
            "build_ext",
            "--build-lib",
            str(folder),
            "--build-temp",
            f"{folder}/tmp",
        ]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
        return folder / "vllm_ascend_pd" / "_C_npu.so"

    def forget_counts(self) -> None:
        for counts in (*self.folder.glob("*.gcda"), *self.folder.glob("lines*")):
            counts.unlink()

    def uncovered_python(self) -> dict[str, tuple[float, list[str]]]:
        """Return the same as `uncovered` for device/ and regroup/, for lines of functions: an import runs others."""
        coverage = [str(self.python), "-m", "coverage"]
        settings, report = f"--rcfile={self._settings()}", self.folder / "report.json"
        for words in (["combine", "--keep", "--quiet", settings], ["json", "--quiet", settings, "-o", str(report)]):
            subprocess.run([*coverage, *words], check=True, capture_output=True, timeout=120, cwd=ROOT)
        by_file = {}
        for name, file in json.loads(report.read_text())["files"].items():
            source = (ROOT / name).read_text()
            text, inside = source.splitlines(), _inside_functions(source)
            missed = [f"{number}: {text[number - 1].strip()}" for number in file["missing_lines"] if number in inside]
            run = [number for number in file["executed_lines"] if number in inside]
            share = len(run) / max(1, len(run) + len(missed))
            by_file[str(Path(name).relative_to("vllm_ascend_pd"))] = (share, missed)
        return by_file

    def uncovered(self) -> dict[str, tuple[float, list[str]]]:
        """Return for each source of the binding the share of lines run since `forget_counts`, and the lines not run."""
        [notes] = self.folder.glob("*binding.gcno")
        command = ["gcov", "--json-format", "--stdout", str(notes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=self.folder)
        by_file = {}
        for file in json.loads(done.stdout)["files"]:
            path = Path(file["file"])
            if ROOT / "csrc" not in path.parents:
                continue
            ran: dict[int, int] = {}
            for line in file["lines"]:
                ran[line["line_number"]] = max(ran.get(line["line_number"], 0), line["count"])
            text = path.read_text().splitlines()
            missed = [f"{number}: {text[number - 1].strip()}" for number, count in sorted(ran.items()) if not count]
            by_file[str(path.relative_to(ROOT / "csrc"))] = (1 - len(missed) / len(ran), missed)
        return by_file

    def ensure(self: BuildT) -> BuildT:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling, which ends: each compiler has a limit
            if not (self.folder / "done").exists():
                self._compile()
                (self.folder / "done").touch()
        return self

    def _run(self, output: str, *arguments: str | Path) -> None:
        compiler = os.environ.get("CXX", "g++")
        soname = f"-Wl,-soname,{output}"
        command = [compiler, "-shared", "-fPIC", soname, "-o", self.folder / output, *arguments]
        subprocess.run(list(map(str, command)), check=True, timeout=400)

    def _compile(self) -> None:
        torch_npu, stand_ins = self._packages["torch_npu"], HERE / "stand_ins"
        strict, here = self._strict(), self._here()
        self._run(self.preloaded.name, "-O1", *strict, stand_ins / "release_thread.cpp")
        self._run("libascendcl.so", "-O1", *strict, stand_ins / "ascendcl.cpp", "-pthread")
        self._run("libhccl.so", "-O1", *strict, stand_ins / "hccl.cpp", *here, "-lascendcl", "-lrt")
        self._run("libopapi.so", "-O2", *strict, stand_ins / "opapi.cpp", *here, "-lascendcl")
        unknown = self.folder / "stubs.c"
        unknown.write_text(stubs(_missing(torch_npu, [self.folder / "libascendcl.so", self.folder / "libhccl.so"])))
        for name in EMPTY:
            extra = ["-x", "c", unknown] if name == EMPTY[0] else ["-x", "c", "/dev/null"]
            # torch_npu looks up some functions by library: each of them must find all.
            self._run(f"lib{name}.so", *extra, "-Wl,--no-as-needed", *here, "-lascendcl")
        self._run("libvapd_kernels.so", "-O2", *strict, stand_ins / "launch.cpp", *here, "-lascendcl")
        self._with_torch("_C_npu.so", *self.binding_flags, ROOT / "csrc/npu/binding.cpp", "-lvapd_kernels")

    def _strict(self) -> list[str | Path]:
        """Return the compiler flags for CANN's headers, which come with torch_npu."""
        include = self._packages["torch_npu"] / "include"
        system = [include, include / "third_party/acl/inc", include / "third_party/hccl/inc"]
        headers = [flag for folder in system for flag in ("-isystem", folder)]
        return ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/csrc", f"-I{HERE}/emulation", *headers]

    def _here(self) -> list[str]:
        return [f"-L{self.folder}", f"-Wl,-rpath,{self.folder}"]

    def _with_torch(self, output: str, *arguments: str | Path) -> None:
        """Compile against torch and torch_npu."""
        torch, torch_npu = self._packages["torch"], self._packages["torch_npu"]
        folders = [torch / "include", torch / "include/torch/csrc/api/include"]
        headers = [flag for folder in folders for flag in ("-isystem", folder)]
        libraries = ["-lascendcl", f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-L{torch_npu}/lib", "-ltorch_npu"]
        self._run(output, *self._strict(), *headers, *arguments, *self._here(), *libraries)


def main() -> None:
    python = interpreter()
    if python is None:
        print("not built: this environment's torch is not the one that the tests' torch_npu belongs to")
        return
    print(Build(python).ensure().folder)


if __name__ == "__main__":
    main()
