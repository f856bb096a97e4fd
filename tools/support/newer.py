# SPDX-License-Identifier: Apache-2.0
"""Installation of a vLLM release that has no wheel for CPUs: its Python code over the installed wheel's compiled parts.

`python -m tools.support.newer RELEASE SITE_PACKAGES` writes it there, from the source distribution.
"""

from __future__ import annotations

import compileall
import shutil
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

from tools.support import sdist

PINS = {
    "0.33.0": sdist.Pin("vllm", "0.33.0", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"),
}
# vLLM reads its platform from the name and version of its distribution.
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"


def install(release: str, site: Path) -> None:
    pin, spec = PINS[release], find_spec("vllm")
    assert spec is not None and spec.origin is not None
    with tarfile.open(sdist.ensure(pin)) as archive:
        inside = [member for member in archive if member.name.startswith(f"{pin.stem}/vllm/")]
        for member in inside:
            member.name = member.name.removeprefix(f"{pin.stem}/")
        archive.extractall(site, inside, filter="data")
    compileall.compile_dir(site / "vllm", quiet=1)  # else each process of each engine does it
    for compiled in Path(spec.origin).parent.glob("*.so"):
        shutil.copy(compiled, site / "vllm")
    info = site / f"vllm-{release}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(METADATA.format(version=release))


if __name__ == "__main__":
    install(sys.argv[1], Path(sys.argv[2]))
