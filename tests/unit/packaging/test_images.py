# SPDX-License-Identifier: Apache-2.0
"""scripts/images.sh: the images of examples/docker are built by a real builder, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_ascend_pd import __version__

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_both_images_are_built_and_the_metaservers_serves(tmp_path: Path) -> None:
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False, timeout=20)
    if tried.returncode or os.geteuid():
        pytest.skip(f"this machine allows no mount namespaces: {tried.stderr.strip() or 'only root may'}")
    assert shutil.which("apt-get"), "the builder comes from Debian's archive"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [ROOT / "scripts" / "images.sh", "--in", tmp_path],
        env=env,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "log").read_text()
    assert '"lacks"' in log and log.count("Successfully tagged localhost/vllm-ascend-pd-") == 2
    assert f"\nengine {__version__}\n" in log
    assert "\n10001\n" in log, "the metaserver's image runs as its user"
