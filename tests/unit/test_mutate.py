# SPDX-License-Identifier: Apache-2.0
"""Random mutants: each is a real change that parses, drawn by seed, and each kind of change is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import mutate

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
    assert not any("3" in before or "docstring" in before for before, _ in made), "no log line and no prose"


def test_what_is_drawn_is_the_same_for_a_seed_parses_and_is_another_program() -> None:
    folders = ["protocol", "geometry"]
    first, again = mutate.drawn(folders, 60, 7), mutate.drawn(folders, 60, 7)
    assert first == again and first != mutate.drawn(folders, 60, 8)
    for mutant in first:
        text = (mutate.ROOT / mutant.path).read_text()
        assert text[mutant.begin : mutant.end] == mutant.before
        assert ast.dump(ast.parse(mutant.applied(text))) != ast.dump(ast.parse(text)), mutant


def test_every_folder_with_tests_of_its_own_is_there() -> None:
    for folder, patterns in mutate.TESTS.items():
        assert (mutate.ROOT / "vllm_ascend_pd" / folder).is_dir()
        for pattern in patterns:
            assert list((mutate.ROOT / "tests/unit").glob(pattern + ".py")), pattern


def test_a_change_that_changes_nothing_needs_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "equivalent.txt"
    file.write_text("# a comment\nvllm_ascend_pd/x.py: a → b # it is never asked\n")
    monkeypatch.setattr(mutate, "EQUIVALENT", file)
    assert mutate.known() == {"vllm_ascend_pd/x.py: a → b": "it is never asked"}
