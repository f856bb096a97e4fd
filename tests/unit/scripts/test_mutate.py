# SPDX-License-Identifier: Apache-2.0
"""Random mutants: each is a real change that parses, drawn by seed, and each kind of change occurs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutate
from tools.support.mutant_tests import FRONT, PROTOCOL

TEXT = '''
def f(a, b):
    """A docstring with 1 < 2."""
    if a < b and not b:
        log.info("%d", 3)
        g(a, b)
    with self._lock:
        total = max(a, 1) + b
    total += 1
    return total

def put(a) -> None:
    """Put it."""
    try:
        g(a, at=1, by=2)
        g(to=4)
    except OSError:
        h(a)
    with suppress(OSError):
        g()
'''


def changes() -> dict[str, str]:
    return {m.before: m.after for m in mutate.mutants_of("x.py", TEXT)}


def test_each_kind_of_change_is_made() -> None:
    made = {(m.before, m.after) for m in mutate.mutants_of("x.py", TEXT)}
    assert ("a < b", "a <= b") in made
    assert ("a < b and not b", "a < b or not b") in made
    assert ("a < b and not b", "not (a < b and not b)") in made
    assert ("not b", "(b)") in made
    assert ("max", "min") in made and ("1", "2") in made
    assert ("g(a, b)", "pass") in made and ("a, b", "b, a") in made
    assert ("self._lock", "__import__('contextlib').nullcontext()") in made
    assert ("total += 1", "pass") in made and ("return total", "return None") in made
    assert ("a < b", "True") in made and ("not b", "True") in made, "a part of a condition"
    assert (", at=1", "") in made and (", by=2", "") in made and ("to=4", "") in made, "a keyword argument"
    assert ("h(a)", "raise") in made and ("suppress(OSError)", "__import__('contextlib').nullcontext()") in made
    emptied = [m for m in mutate.mutants_of("x.py", TEXT) if m.after == "pass" and m.before.startswith("try:")]
    assert [(m.lines, m.before.endswith("g()")) for m in emptied] == [((14, 14), True)], "a function without a result"
    assert not any("3" in before or "docstring" in before for before, _ in made), "no log line and no prose"


def test_what_is_drawn_is_the_same_for_a_seed_parses_and_is_another_program() -> None:
    folders = ["protocol", "geometry"]
    first, second = mutate.drawn(folders, 60, 7), mutate.drawn(folders, 60, 7)
    assert first == second and first != mutate.drawn(folders, 60, 8)
    for mutant in first:
        text = (mutate.ROOT / mutant.path).read_text()
        assert text[mutant.begin : mutant.end] == mutant.before
        assert ast.dump(ast.parse(mutant.applied(text))) != ast.dump(ast.parse(text)), mutant


def test_each_folder_has_its_share() -> None:
    drawn = mutate.drawn(mutate.USUAL, 40, 7)
    paths = [mutant.path.removeprefix("vllm_ascend_pd/") for mutant in drawn]
    assert all(sum(place.startswith(folder) for place in paths) == 5 for folder in mutate.USUAL)


def test_a_change_is_looked_for_by_the_lines_of_its_statement() -> None:
    lines = {(m.before, m.after): m.lines for m in mutate.mutants_of("x.py", TEXT)}
    assert lines["a < b", "a <= b"] == (4, 4), "not what is below the condition"
    assert lines["a, b", "b, a"] == (6, 6) and lines["return total", "return None"] == (10, 10)


CODE = """
def half(n):
    if n < 0:
        return 0
    return n // 2
"""
TESTS = """
import pathlib
from vllm_ascend_pd.x import half
def test_half(): assert half(4) == 2
def test_half_of_nothing(): assert half(0) == 0
def test_that_fails_now_and_then():
    once = pathlib.Path("once")
    if half(-1) != 0 and not once.exists():
        once.touch()
        raise ValueError
"""
ASKED = """
import sys
from pathlib import Path
from tools.support.mutant_tests import Field
root = Path(sys.argv[1])
field = Field(root / "source", root / "copy", root, heavy=())
for line, before, after in ((5, "n // 2", "n * 2"), (4, "return 0", "return 1"), (3, "n < 0", "n <= 0"), (2, "(n)", "[n]")):
    print(field.judge("vllm_ascend_pd/x.py", lambda text: text.replace(before, after), (line, line), ("test_x",), "", 60.0))
"""


def test_which_tests_see_a_change_and_which_do_not(tmp_path: Path) -> None:
    """A test detects a change if it executes it and fails twice; a test that fails only sometimes does not count."""
    for name, text in {
        "vllm_ascend_pd/x.py": CODE,
        "tests/unit/test_x.py": TESTS,
        "vllm_ascend_pd/__init__.py": "",
        "pyproject.toml": "[tool.pytest]",
    }.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(mutate.ROOT)},
    )
    assert done.stdout.splitlines() == ["test_x.py::test_half", "", "", "test_x.py"], done.stdout + done.stderr


def test_every_folder_with_tests_of_its_own_is_there() -> None:
    for folder, patterns in mutate.TESTS.items():
        assert (mutate.ROOT / "vllm_ascend_pd" / folder).exists()
        for pattern in patterns:
            assert list((mutate.ROOT / "tests/unit").rglob(pattern + ".py")), pattern


def test_each_simulator_runs_for_changes_of_what_it_runs() -> None:
    """Where a folder has moved, its changes would go to no simulator, or to another one, and survive."""
    drawn = mutate.drawn(tuple(mutate.TESTS), len(mutate.TESTS), 7)
    by_folder = {mutant.path.split("/")[1]: mutate.simulator_of(mutant) for mutant in drawn}
    none = dict.fromkeys(("transport", "channel", "admission", "vllm_patches"), "")
    assert by_folder == {**mutate.SIMULATED, **none}
    assert by_folder["router"] == FRONT and by_folder["protocol"] == PROTOCOL


def test_a_change_that_changes_nothing_needs_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "equivalent.txt"
    file.write_text("# a comment\nvllm_ascend_pd/x.py: a → b # it is never asked\n")
    monkeypatch.setattr(mutate, "EQUIVALENT", file)
    assert mutate.known() == {"vllm_ascend_pd/x.py: a → b": "it is never asked"}


def test_each_change_that_changes_nothing_can_still_be_made() -> None:
    """A renamed variable or a rewritten comment gives a change another name; its reason would be asked for again."""
    named = mutate.known()
    paths = {name.partition(":")[0] for name in named}
    made = {mutant.name for path in paths for mutant in mutate.mutants_of(path, (mutate.ROOT / path).read_text())}
    assert named and not named.keys() - made
