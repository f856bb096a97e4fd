# SPDX-License-Identifier: Apache-2.0
"""Every link of every page has a target, and the README links to every page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    path.relative_to(ROOT) for pattern in ("*.md", "docs/*.md", "examples/**/*.md") for path in ROOT.glob(pattern)
)
READMES = (Path("README.md"), Path("README.zh-CN.md"))
SCREEN = 50  # lines


def links(text: str) -> list[str]:
    """Targets inside the repository; code blocks are left out."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", prose)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """Anchors of headings, formed like GitHub's."""
    headings = re.findall(r"^#+ +(.*)$", (ROOT / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def target_of(page: Path, target: str) -> Path:
    path = target.split("#")[0]
    return (ROOT / page.parent / path).resolve().relative_to(ROOT) if path else page


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links((ROOT / page).read_text()):
        found = target_of(page, target)
        assert (ROOT / found).exists(), f"{page} links to {target}"
        if "#" in target:
            assert target.split("#")[1] in anchors(found), f"{page} links to {target}"


def reachable(start: Path, lines: int | None = None) -> set[Path]:
    """Pages that links lead to, the first page read as far as `lines`."""
    seen: set[Path] = set()
    text = "\n".join((ROOT / start).read_text().splitlines()[:lines])
    waiting = [target_of(start, target) for target in links(text)]
    while waiting:
        page = waiting.pop()
        if page.suffix == ".md" and page not in seen:
            seen.add(page)
            waiting += [target_of(page, target) for target in links((ROOT / page).read_text())]
    return seen | {start}


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_every_page_is_reached_from_the_readmes_first_screen(readme: Path) -> None:
    assert set(PAGES) - reachable(readme, SCREEN) == set()


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_the_readmes_first_screen_names_the_instruments(readme: Path) -> None:
    screen = "\n".join((ROOT / readme).read_text().splitlines()[:SCREEN])
    for name in ("doctor", "plan", "trace", "metaserver", "grafana.json", "quickstart.sh", "test.sh"):
        assert name in screen, name


def test_both_readmes_lead_to_the_same_places() -> None:
    one, other = ({target_of(page, link) for link in links((ROOT / page).read_text())} for page in READMES)
    assert one - set(READMES) == other - set(READMES)


def test_commands_in_both_readmes_are_the_same() -> None:
    def commands(page: Path) -> list[str]:
        blocks = re.findall(r"^```\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
        lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
        return [line for line in lines if re.match(r"(\./|pip|vllm|\")", line)]

    assert commands(READMES[0]) == commands(READMES[1])


def structure(page: Path) -> list[tuple[str, object]]:
    """Headings, rows of tables and blocks of code in order; of a row its numbers and how many cells it has."""
    found: list[tuple[str, object]] = []
    code = False
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("```"):
            code = not code
            found.append(("code", None))
        elif not code and line.startswith("#"):
            found.append(("heading", line.split(" ")[0]))
        elif not code and line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip("|"))
            found.append(("row", [tuple(re.findall(r"\d+(?:\.\w+)*", cell)) for cell in cells]))
    return found


def test_both_readmes_have_the_same_headings_and_tables() -> None:
    one, other = (structure(page) for page in READMES)
    assert one == other
    assert sum(kind == "row" for kind, _ in one) > 20


def test_both_readmes_say_as_much_in_bold() -> None:
    one, other = (re.findall(r"\*\*[^*]+\*\*", (ROOT / page).read_text()) for page in READMES)
    assert len(one) == len(other) >= 3


def test_the_changelog_names_what_the_release_has() -> None:
    from vllm_ascend_pd.cli.__main__ import SUBCOMMANDS

    text = (ROOT / "CHANGELOG.md").read_text()
    wanted = [f"`vllm-ascend-pd {name}`" for name in SUBCOMMANDS]
    for name in (*wanted, "AscendPushConnector", "Regroup", "status page", "grafana.json", "simulate.sh", "NPU"):
        assert name in text, name
    assert "--notes-file CHANGELOG.md" in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_the_drawing_of_the_folders_has_each_folder() -> None:
    """CONTRIBUTING.md, "Where things are": a line starts with a folder, or with two; inner ones are indented."""
    drawn, outer = set[str](), ""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things are")[1].split("```")[1]
    for line in text.splitlines():
        names = re.findall(r"([\w.]+)/(?=[, ]|$)", line[:22])
        if names and not line.startswith(" "):
            outer = names[0]
        drawn |= {f"{outer}/{name}" if line.startswith(" ") else name for name in names}
    files = subprocess.run(("git", "-C", str(ROOT), "ls-files"), check=True, capture_output=True, text=True).stdout
    folders = [path.split("/") for path in files.split()]
    wanted = {parts[0] for parts in folders if len(parts) > 1 and not parts[0].startswith(".")}
    wanted |= {"/".join(parts[:2]) for parts in folders if len(parts) > 2 and parts[0] in ("vllm_ascend_pd", "tests")}
    assert wanted == drawn
