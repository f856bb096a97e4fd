# SPDX-License-Identifier: Apache-2.0
"""The libraries of tests/native, built for the torch_npu of an environment of vllm-ascend, and two more of this folder.

libatb                    empty but for the loader: ATB's operators are taken over before they get there
libascend_host.so         operators.cpp: takes torch's operators over

python tests/ascend_host/host_build.py [RELEASE]       builds if needed; prints what a process needs, as NAME=VALUE
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "native"))

import npu_build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASE, OLDER = "0.30", "0.23"  # releases of vllm-ascend: what every change runs under, and the one before


def environment(release: str = BASE) -> Path:
    """Return the folder in which environment.sh makes the environment of a release."""
    return ROOT / (".venv-ascend-host" if release == BASE else f".venv-ascend-host-{release}")


class HostBuild(npu_build.Build):
    sources = (*npu_build.Build.sources, HERE)
    binding_flags = ("-O2",)

    @classmethod
    def of(cls, release: str = BASE) -> HostBuild:
        return cls(environment(release) / "bin/python").ensure()

    def variables(self) -> dict[str, str]:
        """Return a process's variables beyond the caller's environment.

        PYTHONPATH, which must begin with `plugins`, is not among them.
        """
        return {
            "LD_LIBRARY_PATH": str(self.folder),
            "LD_PRELOAD": str(self.preloaded),
            "ASCEND_HOST_OPERATORS": str(self.folder / "libascend_host.so"),
            "VLLM_ASCEND_PD_NPU_LIBRARY": str(self.binding),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_OFFLINE": "1",
            # vLLM keeps what it finds out about a model's class by the class's name: two releases with the same folder
            # would overwrite each other's, and each engine would import its model twice.
            "VLLM_CACHE_ROOT": str(self.python.parents[1] / ".vllm"),
        }

    # Separate folders, so that tests can import the references without replacing their own torch's operators.
    plugins = (HERE / "plugin", HERE / "entry")

    def _compile(self) -> None:
        super()._compile()
        atb = npu_build.symbols(self._packages["torch_npu"] / "lib/libop_plugin_atb.so", "--undefined-only")
        stubs = self.folder / "atb.c"
        stubs.write_text(npu_build.stubs(sorted(name for name in atb if name.startswith("_ZN3atb"))))
        self._run("libatb.so", "-x", "c", stubs)
        self._with_torch("libascend_host.so", "-O2", f"-I{npu_build.HERE}/stand_ins", HERE / "operators.cpp")


def main() -> None:
    build = HostBuild.of(*sys.argv[1:2])
    path = ":".join(map(str, (*build.plugins, ROOT)))
    for name, value in {**build.variables(), "PYTHONPATH": path}.items():
        print(f"{name}={value}")


if __name__ == "__main__":
    main()
