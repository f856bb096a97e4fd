# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md and docs/migration.md list everything that an operator meets, and nothing that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.kits.flags import subcommands
from vllm_ascend_pd import config
from vllm_ascend_pd.cli.__main__ import parser
from vllm_ascend_pd.errors import CATALOGUE
from vllm_ascend_pd.observe.tally import METRICS

ROOT = Path(__file__).resolve().parents[3]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
MIGRATION = (ROOT / "docs" / "migration.md").read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the tables below a heading."""
    section = text.split(f"## {heading}", 1)[1].split("\n## ", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


def test_every_metric_is_explained_and_no_other() -> None:
    names = [
        name for cells in rows(OPERATIONS, "What each metric means")[2:] for name in re.findall(r"`(\w+)`", cells[0])
    ]
    assert sorted(names) == sorted(METRICS)


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_error_has_its_line(code: str) -> None:
    codes = " ".join(cells[0] for cells in rows(OPERATIONS, "What to do when an error comes"))
    assert code in codes or code.rpartition("-")[0] + "-…" in codes


def test_codes_that_are_named_exist() -> None:
    assert set(re.findall(r"PD-[A-Z]+-\d{3}", OPERATIONS + MIGRATION)) <= set(CATALOGUE)


@pytest.mark.parametrize("key", (*config.IGNORED, *config.CHECKED_SIZES))
def test_every_key_of_the_predecessor_is_explained(key: str) -> None:
    assert f"`{key}`" in MIGRATION


def test_flags_that_the_pages_name_exist() -> None:
    known = set(re.findall(r"--[a-z][a-z-]+", "".join(s.format_help() for s in subcommands(parser()).values())))
    vllms = {"--api-key", "--enforce-eager", "--kv-transfer-config", "--max-model-len", "--shutdown-timeout"}
    vllms |= {"--disable-access-log-for-endpoints", "--no-async-scheduling", "--kv-cache-dtype"}
    ours = set(re.findall(r"`(--[a-z][a-z-]+)", OPERATIONS + MIGRATION)) - vllms
    assert ours <= known


def test_the_engines_api_key_has_its_row() -> None:
    """The predecessor's proxy read it from the environment; a short one is refused here."""
    (row,) = [cells for cells in rows(MIGRATION, "Proxy") if "OPENAI_API_KEY" in cells[0]]
    assert (
        "`--engine-token-file" in row[1]
        and "--lend-engine-token`" in row[1]
        and "16 characters" in row[1]
        and "PD-SEC-004" in row[1]
    )


def test_links_lead_somewhere() -> None:
    for text in (OPERATIONS, MIGRATION):
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / "docs" / target).exists(), target
