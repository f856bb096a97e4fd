# SPDX-License-Identifier: Apache-2.0
"""The previous release of this package reads what this one writes, and this one reads its answer: no engine needed.

A pair of engines of both is `tests/integration/test_rollout.py`.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tools.support import previous
from unit.protocol import wire_examples as words
from unit.releases.previous_reads import READ
from vllm_ascend_pd.protocol.versions import fingerprint, may_pair

PROGRAM = Path(__file__).parent / "previous_reads.py"
NEW: frozenset[str] = frozenset()  # names of messages that the previous state cannot know yet
UNFILLED = (None, "", 0, -1, False, [], b"")  # -1: no rank
WRITTEN: dict[str, tuple[str, bytes]] = {name: (how, made) for name, how, made in words.written() if name not in NEW}


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcomes of the previous package with today's words."""
    name, folder = previous.commit(), tmp_path_factory.mktemp("previous")
    try:
        previous.package(folder, name)
    except previous.NotThere as why:
        pytest.skip(str(why))
    encoded = {key: (how, base64.b64encode(made).decode()) for key, (how, made) in WRITTEN.items()}
    given = json.dumps({"words": encoded, "model": "m", "fingerprint": fingerprint("m")})
    env = {"PYTHONPATH": str(folder), "PATH": os.defpath}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], input=given, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{name} cannot read what this state writes: {done.stderr[-2000:]}"
    outcomes: dict[str, Any] = json.loads(done.stdout)
    assert Path(outcomes["package"]).is_relative_to(folder), "the previous package has read, not this one"
    return outcomes


def test_the_previous_release_reads_what_this_one_writes_and_the_reverse(answer: dict[str, Any]) -> None:
    assert answer["words"].keys() == WRITTEN.keys()
    for name, (how, made) in WRITTEN.items():
        back = base64.b64decode(answer["words"][name])
        READ[how](back)  # this release reads it
        kept(plain(how, back), plain(how, made), name)


def test_a_metaserver_pairs_the_two(answer: dict[str, Any]) -> None:
    assert answer["pairs"] is True and may_pair(answer["own"], fingerprint("m"))


def plain(how: str, made: bytes) -> Any:
    if how in ("posted", "answer"):
        return msgspec.json.decode(made)
    decoded = msgspec.msgpack.decode(made[4:] if how in ("reservation", "source", "first") else made)
    if how == "reservation":
        decoded["layout"] = msgspec.msgpack.decode(decoded["layout"])
    return decoded


def kept(reread: Any, wanted: Any, where: str) -> None:
    """Check that nothing has changed its meaning on the way. What only this release knows may be missing."""
    if isinstance(reread, dict):
        for key, value in reread.items():
            if key in wanted:
                kept(value, wanted[key], f"{where}.{key}")
            else:
                assert value in UNFILLED, f"{where}.{key} came from nowhere: {value}"
    elif isinstance(reread, list):
        for index, value in enumerate(reread):
            if index < len(wanted):
                kept(value, wanted[index], f"{where}[{index}]")
            else:
                assert value in UNFILLED, f"{where}[{index}] came from nowhere: {value}"
    else:
        assert reread == wanted, f"{where}: {reread} instead of {wanted}"


def test_until_a_release_a_change_of_the_wire_is_the_oldest_state_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a release it is that one, whatever has changed since."""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], capture_output=True, check=True, timeout=60
        )
        return done.stdout.decode().strip()

    def commit(path: str) -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{path} {len(made)}")
        git("add", path)
        git("commit", "-q", "-m", path)
        made.append(git("rev-parse", "HEAD"))
        return previous.commit(tmp_path)

    made: list[str] = []
    git("init", "-q")
    monkeypatch.delenv("PD_PREVIOUS", raising=False)
    monkeypatch.setattr(previous, "BEFORE_RELEASES", "HEAD~2")
    commits = [commit(path) for path in (previous.RECORDED, "a", "b", "c", previous.RECORDED, "d", "e", "f")]
    assert commits == ["HEAD~2"] * 4 + [made[4]] * 2 + ["HEAD~2"] * 2
    git("tag", "v1.0.0", made[0])
    assert commit(previous.RECORDED) == "v1.0.0"


@pytest.mark.parametrize(("named", "actions"), [("v0.0.0", ""), ("", "true"), ("", "")])
def test_only_a_checkout_without_history_and_outside_of_a_workflow_skips_it(
    named: str, actions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that is not there, and a workflow without history, fail."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=60)
    monkeypatch.setattr(previous, "ROOT", tmp_path)
    for name, value in (("PD_PREVIOUS", named), ("GITHUB_ACTIONS", actions)):
        monkeypatch.setenv(name, value)
    name = previous.commit(tmp_path)
    assert name == (named or previous.BEFORE_RELEASES)
    with pytest.raises(RuntimeError) as caught:
        previous.package(tmp_path, name)
    assert isinstance(caught.value, previous.NotThere) is not bool(named or actions), caught.value
