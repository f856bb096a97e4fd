# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ extension `vllm_ascend_pd._C` against the installed torch; everything else is in pyproject.toml.

torch's stable ABI and Python's limited API make one wheel (cp310-abi3) that runs with torch 2.10 and later. torch is no
build requirement: pip's build isolation would download its newest CUDA build. It hides the installed torch from
`import`, but does not move it, and the extension needs only its headers and one library.

Environment: VLLM_ASCEND_PD_TORCH  the folder of the torch package, where it is not found by itself
             VLLM_ASCEND_PD_NPU    auto (default), 0: no NPU kernels, 1: fail unless they can be built
             VLLM_ASCEND_PD_OPS    1 (default), 0: no extension at all, so neither torch nor a compiler is needed: for a
                                   host of the router and of the commands, never for an engine
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import site
import sysconfig
from pathlib import Path
from typing import NamedTuple, NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError, SetupError

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 10)
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10.0: torch's headers hide what came later
LIMITED_API = "0x030a0000"  # Python 3.10


class MissingError(SetupError):
    """Something that the build needs is not there. The text says what, and what to do."""


def missing(what: str, remedy: str) -> NoReturn:
    raise MissingError(f"\n\n  vllm_ascend_pd cannot be built: {what}\n  {remedy}\n")


# ---- torch: headers and libtorch_cpu, found without importing it


def package_folder(name: str) -> Path | None:
    """Return where a package is installed for this interpreter, even if build isolation keeps it off sys.path."""
    folders = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), site.getusersitepackages()]
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin:
        folders.insert(0, str(Path(spec.origin).parent.parent))
    return next((Path(f, name) for f in folders if Path(f, name, "__init__.py").is_file()), None)


class Torch(NamedTuple):
    folder: Path
    version: str

    @classmethod
    def find(cls) -> Torch:
        given = os.environ.get("VLLM_ASCEND_PD_TORCH")
        folder = Path(given) if given else package_folder("torch")
        if folder is None or not (folder / "version.py").is_file():
            missing(
                f"torch is missing ({given} holds no torch package)." if given else
                f"torch is missing (not installed in {sysconfig.get_path('platlib')}).",
                "Install torch >= 2.10 for this interpreter first: vLLM brings it on a CPU or NPU host, or see "
                "docs/building.md.\n  Where the build runs in an environment of its own (uv, python -m build): "
                "--no-build-isolation, or VLLM_ASCEND_PD_TORCH=<folder of the torch package>.\n  "
                "For the commands and the metaserver alone, on a host without engines: VLLM_ASCEND_PD_OPS=0.",
            )  # fmt: skip
        found = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())
        torch = cls(folder, found.group(1) if found else "unknown")
        torch.check()
        return torch

    def check(self) -> None:
        numbers = tuple(int(n) for n in re.findall(r"\d+", self.version)[:2])
        if numbers < OLDEST_TORCH:
            missing(f"torch {self.version} in {self.folder} is too old.", "Install torch 2.10 or later.")
        for part in ("include/torch/csrc/stable/library.h", "lib/libtorch_cpu.so"):
            if not (self.folder / part).is_file():
                missing(f"{part} is missing in {self.folder}.", "Reinstall torch from a wheel.")


# ---- NPU kernels: the seam. csrc/npu/CMakeLists.txt is built where CANN and torch_npu are present.


class NpuToolchain(NamedTuple):
    cann: Path
    soc: str
    torch_npu: Path

    @classmethod
    def find(cls) -> NpuToolchain | None:
        """Return the toolchain; None if none is there, or wanted. VLLM_ASCEND_PD_NPU=1 turns None into an error."""
        wanted = os.environ.get("VLLM_ASCEND_PD_NPU", "auto")
        if wanted not in ("auto", "0", "1"):
            missing(f"VLLM_ASCEND_PD_NPU={wanted} is not understood.", "Set it to auto, 0 or 1.")
        if wanted == "0":
            return None
        cann, soc = os.environ.get("ASCEND_HOME_PATH", ""), os.environ.get("SOC_VERSION", "")
        torch_npu = package_folder("torch_npu")
        lacking = []
        if not cann or not Path(cann).is_dir():
            lacking.append(f"CANN (ASCEND_HOME_PATH={cann or 'not set'}: source its set_env.sh)")
        if not soc:
            lacking.append("the chip (SOC_VERSION is not set: for example ascend910b1, see npu-smi info)")
        if torch_npu is None:
            lacking.append("torch_npu (pip install the version that matches torch)")
        if not (ROOT / "csrc/npu/CMakeLists.txt").is_file():
            lacking.append("the kernels' sources (csrc/npu/CMakeLists.txt)")
        if torch_npu is None or lacking:
            if wanted == "1":
                missing(
                    "VLLM_ASCEND_PD_NPU=1, but these are missing: " + "; ".join(lacking) + ".",
                    "Provide them, or leave VLLM_ASCEND_PD_NPU at auto for a build without NPU kernels.",
                )
            return None
        return cls(Path(cann), soc, torch_npu)


# ---- the extension


def sources() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in ("*.cpp", "cpu/*.cpp") for p in (ROOT / "csrc").glob(pattern))


def headers() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h"))


class BuildExtension(build_ext):
    """Completes the extension when it is really built, so that metadata and source archives need no torch."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # scripts/setup.sh decides whether it must be rebuilt, from contents: no file's mtime shows the flags.
        self.force = True

    def run(self) -> None:
        torch, npu = Torch.find(), NpuToolchain.find()
        self.check_compiler()
        for extension in self.extensions:
            extension.extra_compile_args += ["-isystem", str(torch.folder / "include")]  # its warnings are not ours
            extension.library_dirs.append(str(torch.folder / "lib"))
        print(f"vllm_ascend_pd: torch {torch.version} in {torch.folder}; NPU kernels: {'yes' if npu else 'no'}")
        super().run()
        if npu:
            self.build_npu(torch, npu)

    def build_npu(self, torch: Torch, npu: NpuToolchain) -> None:
        """The NPU library lies beside the extension. It is optional unless VLLM_ASCEND_PD_NPU=1 asks for it."""
        output = Path(self.get_ext_fullpath("vllm_ascend_pd._C")).resolve().parent
        folder = Path(self.build_temp).resolve() / "npu"
        options = {
            "ASCEND_HOME_PATH": npu.cann,
            "SOC_VERSION": npu.soc,
            "TORCH_DIR": torch.folder.resolve(),
            "TORCH_NPU_DIR": npu.torch_npu.resolve(),
            "OUTPUT_DIR": output,
        }
        defines = [f"-D{name}={value}" for name, value in options.items()]
        try:
            self.spawn(["cmake", "-S", str(ROOT / "csrc/npu"), "-B", str(folder), *defines])
            self.spawn(["cmake", "--build", str(folder)])
        except (ExecError, OSError) as error:
            remedy = "See the output above; VLLM_ASCEND_PD_NPU=0 builds without them."
            if os.environ.get("VLLM_ASCEND_PD_NPU") == "1":
                missing(f"the NPU kernels for {npu.soc} do not build ({error}).", remedy)
            print(f"vllm_ascend_pd: the NPU kernels for {npu.soc} do not build ({error}): going on without. {remedy}")

    @staticmethod
    def check_compiler() -> None:
        compiler = shlex.split(os.environ.get("CXX", "") or sysconfig.get_config_var("CXX") or "c++")[0]
        if shutil.which(compiler) is None:
            missing(f"the C++ compiler {compiler!r} is missing.", "Debian: apt-get install g++; or set CXX.")
        include = Path(sysconfig.get_path("include"))
        if not (include / "Python.h").is_file():
            missing(
                f"Python.h is missing in {include}.", "Debian: apt-get install python3-dev (of this Python version)."
            )


# ---- the page of a package index: what is built for GitHub names the repository, and its links lead there


def repository() -> str:
    """Return the address of the repository that GitHub builds; "" elsewhere."""
    server, name = (os.environ.get(f"GITHUB_{word}", "") for word in ("SERVER_URL", "REPOSITORY"))
    return f"{server}/{name}" if server and name else ""


def readme(url: str) -> str:
    text = (ROOT / "README.md").read_text()
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "vllm_ascend_pd/__init__.py").read_text(), re.MULTILINE)
    if not url or version is None:
        return text

    def absolute(link: re.Match[str]) -> str:
        return f"{link[1]}({url}/{'raw' if link[1].startswith('!') else 'blob'}/v{version[1]}/{link[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?!#|\w+:)([^)\s]+)\)", absolute, text)


url = repository()
with_ops = os.environ.get("VLLM_ASCEND_PD_OPS", "1")
if with_ops not in ("0", "1"):
    missing(f"VLLM_ASCEND_PD_OPS={with_ops} is not understood.", "Set it to 0 or 1.")
setup(
    long_description=readme(url),
    long_description_content_type="text/markdown",
    project_urls={"Repository": url, "Changelog": f"{url}/blob/main/CHANGELOG.md"} if url else {},
    ext_modules=[
        Extension(
            "vllm_ascend_pd._C",
            sources=sources(),
            depends=headers(),
            include_dirs=["csrc"],
            libraries=["torch_cpu"],
            define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION), ("Py_LIMITED_API", LIMITED_API)],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"],
            extra_link_args=["-Wl,--as-needed"],
            language="c++",
            py_limited_api=True,
        )
    ]
    if with_ops == "1"
    else [],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
