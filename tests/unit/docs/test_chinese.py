# SPDX-License-Identifier: Apache-2.0
"""Pages in docs/zh have what their English pages have: headings, commands, codes, names, numbers and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unit.docs.pages import ROOT, TRANSLATED, by_hand, cells, commands, links, one_link, original, structure
from vllm_ascend_pd.errors import CATALOGUE

CHINESE = {page: Path("docs", "zh", page.name) for page in TRANSLATED}
CODE = re.compile(r"PD-[A-Z]+-(?:\d{3}|…)")
NAME = re.compile(r"--[a-z-]+|\b[A-Za-z]+(?:_[A-Za-z0-9]+)+\b|docs/\w+\.md")


def test_what_an_operator_needs_is_there() -> None:
    assert {page.stem for page in CHINESE} == {"start", "migration", "operations", "errors"}


@pytest.mark.parametrize("page", CHINESE, ids=str)
def test_both_languages_have_the_same_structure(page: Path) -> None:
    """The tables that a tool writes are in the English page alone."""
    one, other = (structure(each, by_hand((ROOT / each).read_text())) for each in (page, CHINESE[page]))
    assert one == other
    assert sum(line.kind == "heading" for line in other) > 1


@pytest.mark.parametrize("page", CHINESE, ids=str)
def test_both_languages_have_the_same_commands_and_codes(page: Path) -> None:
    one, other = (by_hand((ROOT / each).read_text()) for each in (page, CHINESE[page]))
    assert commands(one) == commands(other)
    assert sorted(CODE.findall(one)) == sorted(CODE.findall(other))


def test_each_error_has_its_row_with_the_same_values_and_names() -> None:
    one, other = (
        {row[0]: row[1:] for row in map(cells, (ROOT / page).read_text().splitlines()) if CODE.fullmatch(row[0])}
        for page in (Path("docs/errors.md"), CHINESE[Path("docs/errors.md")])
    )
    assert [*one] == [*other] == [*CATALOGUE]
    for code in one:
        for said, translated in zip(one[code], other[code], strict=True):
            for what in (re.compile(r"\*\w+\*"), NAME):
                assert sorted(what.findall(said)) == sorted(what.findall(translated)), code


@pytest.mark.parametrize("page", [*CHINESE.values(), Path("README.zh-CN.md")], ids=str)
def test_a_chinese_page_leads_to_chinese_pages(page: Path) -> None:
    """Where there is one; its own English form is at its head, and may have tables of a tool."""
    text = (ROOT / page).read_text()
    for target in links(text):
        linked_page = (ROOT / page.parent / target.partition("#")[0]).resolve().relative_to(ROOT)
        if linked_page in TRANSLATED and one_link(page, target):
            assert linked_page == original(page) or "#where-" in target, f"{page} links to {target}"


@pytest.mark.parametrize("page", CHINESE, ids=str)
def test_each_word_is_translated_one_way(page: Path) -> None:
    text = (ROOT / CHINESE[page]).read_text()
    for wrong in ("提示语", "仪表盘", "仪表板", "预约", "令牌数", "标记数", "密匙", "解码器引擎", "节点引擎"):
        assert wrong not in text, wrong
