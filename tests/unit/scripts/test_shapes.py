# SPDX-License-Identifier: Apache-2.0
"""tools/support/shapes.py: the table of kinds and shapes counts each set of engines once, and asks admission."""

from __future__ import annotations

import re

import pytest

from tools.support.from_tests import engine_sets
from tools.support.shapes import grid, kind, refused, shape

SETS = {engines.title: engines for engines in engine_sets()}


@pytest.mark.parametrize(
    ("title", "of", "shaped"),
    [
        ("gqa 4to2 regrouped", "GQA", "4→2"),
        ("mha 2to1", "MHA", "2→1"),
        ("mqa pcp 2 to dcp 2", "MQA", "PCP→DCP"),
        ("moe 2to1 dp 1to2", "GQA, experts apart", "TP→DP"),
        ("shapes mtp pp 2to1", "MLA, `mtp`", "PP→TP"),
        ("dsa 1to1 int8 mtp", "DSA (DeepSeek-V3.2) in int8, `mtp`", "1→1"),
        ("dsa 1to1 glm", "DSA (GLM-5)", "1→1"),
    ],
)
def test_a_set_is_known_by_its_kind_and_its_shape(title: str, of: str, shaped: str) -> None:
    assert (kind(SETS[title]), shape(SETS[title])) == (of, shaped)


def test_each_set_counts_once_and_in_its_row() -> None:
    head, lines = grid(SETS.values(), {title: title[0] for title in SETS})
    assert {len(line) for line in lines} == {len(head)}
    counts = [int(match[1]) for line in lines for match in (re.match(r"(\d+) ", cell) for cell in line[1:]) if match]
    assert sum(counts) == len(SETS)
    (mqa,) = (dict(zip(head, line, strict=True)) for line in lines if line[0] == "MQA")
    assert (mqa["1→1"], mqa["PCP→DCP"]) == ("1 (m)", "1 (m)")


def test_a_shape_that_a_kind_has_not_is_empty() -> None:
    of = {title: SETS[title] for title in ("mqa 1to1", "gqa 1to1", "gqa 4to2 regrouped")}
    assert grid(of.values(), {title: title[0] for title in of}) == (
        ("kind", "1→1", "4→2"),
        [("GQA", "1 (g)", "1 (g)"), ("MQA", "1 (m)", "")],
    )


def test_no_set_is_refused_and_what_has_none_may_be() -> None:
    assert not [title for title, engines in SETS.items() if refused(engines, engines)]
    assert refused(SETS["eagle3 2to1"], SETS["mla dcp 2to1"]), "context parallelism with a draft that is not MTP"
    assert not refused(SETS["mtp 1to1"], SETS["mla dcp 2to1"]), "with MTP it has been tried"
    assert refused(SETS["dsa 1to1"], SETS["shapes gqa pcp 2 to 1"]), "an indexer with PCP"
    assert refused(SETS["shapes dsa pp 2to1"], SETS["others gqa 2 to pp 2"]), "a pipeline on P alone"
    assert refused(SETS["mha 2to1"], SETS["mqa dcp 2to1"]), "ranks without a common head"
    assert not refused(SETS["gqa 1to1"], SETS["gqa dcp 4to2"]), "they may have one, whatever the set's own heads are"
