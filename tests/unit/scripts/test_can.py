# SPDX-License-Identifier: Apache-2.0
"""tools/support/can.py: what ran has a record or a test, the rest is admission's word.

test_matrix.py compares the page.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tools import matrix
from tools.support import bases, can, from_tests, sdist
from tools.support.bases import Base
from tools.support.matrix import ROWS

SETS = {str(engines): (engines, asked) for engines, asked in from_tests.asked_sets()}
FEATURES = {feature.title: feature for feature in can.FEATURES}
KINDS = {kind.title.split(":")[0]: kind for kind in can.KINDS}


def test_each_set_compares_log_probabilities_within_a_bound() -> None:
    """Equal tokens show little of a cache."""
    limits = {engines.tally.limit for engines, _ in SETS.values()}
    assert len(SETS) > 100 and limits == {1e-4, 0.125, 0.25}
    assert all(engines.indexed for engines, _ in SETS.values() if engines.tally.limit == 0.25)


@pytest.mark.parametrize(("pin", "base"), [(sdist.VLLM_ASCEND, can.NEW), (sdist.OLDER, can.OLD)], ids=["new", "old"])
def test_a_base_is_what_the_releases_own_code_says(pin: sdist.Pin, base: Base) -> None:
    try:
        path = sdist.ensure(pin)
    except sdist.Unreachable as problem:
        pytest.skip(str(problem))
    base_in_code = Base.of(pin.version, sdist.read(path, "", (".py", bases.RECIPE)))
    assert replace(base_in_code, schedulers=()) == base


def test_a_mark_follows_the_record_then_the_tests_then_admission() -> None:
    title, feature, kind = "gqa 1to2 full graphs", FEATURES["full graphs on D"], KINDS["GQA"]

    def marks(*recorded: str) -> str:
        return "".join(can.mark(feature, kind, base, [title], SETS, {title: recorded}) for base in can.BASES.values())

    assert can.is_of(kind, SETS[title][0]) and feature.has(*SETS[title])
    assert [marks(), marks("0.23"), marks("0.30", "0.23")] == ["◐○○", "◐●○", "●●○"]


@pytest.mark.parametrize(
    ("feature", "kind", "base", "refused"),
    [
        ("TP alike", "windows", can.NEW, True),
        ("TP alike", "windows", can.CPU, False),
        ("TP alike", "Mamba-2", can.CPU, False),
        ("DCP", "GQA", can.NEW, False),
        ("DCP", "GQA", can.CPU, True),
        ("K and V in fp8", "MLA", can.CPU, True),
        ("index keys in int8 (C8)", "DSA", can.OLD, False),
        ("a pipeline on P", "DSA", can.NEW, False),
        ("a pipeline on D", "DSA", can.NEW, True),
    ],
)
def test_what_has_not_run_is_admissions_word(feature: str, kind: str, base: Base, refused: bool) -> None:
    assert can.refused(FEATURES[feature], KINDS[kind], base) is refused


def test_no_set_of_engines_is_refused_under_its_own_release() -> None:
    of_release = {base.minor: base for base in can.BASES.values() if base.ascend}
    for feature in can.FEATURES:
        for kind in can.KINDS:
            for engines, asked in SETS.values():
                if can.is_of(kind, engines) and feature.has(engines, asked) and can.first(kind) not in feature.never:
                    assert not can.refused(feature, kind, of_release[engines.release]), (feature.title, engines.title)


def test_what_ran_on_a_cpu_has_a_test_and_a_good_record() -> None:
    """The cover of kinds and features (test_cover.py) is no row; docs/kinds.md says what it ran."""
    lines = matrix.known(matrix.PAGE.read_text())
    named = {can.cpu_file(feature, kind) for feature in can.FEATURES for kind in can.KINDS} - {"", "cover"}
    for name in sorted(named):
        file = f"tests/integration/test_{name}.py"
        rows = [row.name for row in ROWS if row.tests[0] == file]
        assert (matrix.ROOT / file).is_file() and rows, file
        assert all(re.match(r"\d+ passed", lines[row][matrix.RESULT]) for row in rows), file
    assert not [kind.title for kind in can.KINDS if kind.cpu and can.refused(FEATURES["TP alike"], kind, can.CPU)]


def test_the_page_names_the_marks_and_the_bases_in_their_order() -> None:
    page = matrix.PAGE.read_text()
    before = page.partition("## Can I?")[2].partition("<!--")[0]
    positions = [before.find(f" {name}") for name in can.BASES]
    assert positions == sorted(positions) and min(positions) > 0
    assert all(f"{mark} " in before for mark in (can.RAN, can.TESTED, can.STARTS, can.REFUSED, "–"))
    assert page.index("## Can I?") < page.index("## Runs")
