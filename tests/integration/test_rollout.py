# SPDX-License-Identifier: Apache-2.0
"""A rollout: an engine with the last release of this package, on either side, with today's other engine and metaserver.

Until there is a release, an earlier commit takes its place (tools/support/previous.py).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pairs import PairMaker

from tools.support import previous
from tools.support.cluster import Cluster
from tools.support.engine import EngineProcess
from tools.support.models import ROOT, ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The earlier package with its C++ ops."""
    name, folder = previous.commit(), tmp_path_factory.mktemp("previous")
    try:
        return previous.with_ops(previous.package(folder, name), name)
    except previous.NotThere as why:
        pytest.skip(str(why))


def package_of(engine: EngineProcess) -> Path:
    """Return the path of the package that an engine's interpreter imports."""
    command = [engine.spec.python, "-c", "import vllm_ascend_pd; print(vllm_ascend_pd.__file__)"]
    env = engine.spec.environ()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60)
    return Path(done.stdout.split()[-1]).parents[1]


@pytest.mark.parametrize(
    "older", [pytest.param("prefill", marks=pytest.mark.ci), pytest.param("decode", marks=pytest.mark.slow)]
)
def test_an_earlier_package_beside_todays(
    older: str,
    earlier: Path,
    cluster: Cluster,
    allowed: list[str],
    make_pair: PairMaker,
    progress: Callable[[str], None],
) -> None:
    shape = {"block_size": 32, "chunk": 256}
    started = cluster.start(
        *(
            EngineSpec(
                f"rollout-{older}-{side}",
                ensure("gqa"),
                role=role,
                extra=cluster.push_config(*urls),
                plugins=(earlier,) if side == older else (),
                # Do not import from the working directory, which is this checkout.
                environment={"PYTHONSAFEPATH": "1"} if side == older else {},
                **shape,
            )
            for side, role, urls in (("prefill", "kv_producer", []), ("decode", "kv_consumer", allowed))
        )
    )
    pair = None
    try:
        pair = make_pair(*started)
        pair.check_lengths(f"older {older}")
        for engine, side in zip(started, ("prefill", "decode"), strict=True):
            assert package_of(engine) == (earlier if side == older else ROOT), engine.name
        name = previous.commit()
        commit = previous.git("rev-parse", "--short", f"{name}^{{commit}}").stdout.decode().strip()
        progress(f"figure: {older} of {commit} ({name}): 11 answers")
    finally:
        cluster.stop(*((pair.front,) if pair is not None else ()), *started)
