# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation as tests read them: links, headings, commands, and what two languages share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "tests/*/*.md", "vllm_ascend_pd/**/*.md")
    for path in ROOT.glob(pattern)
)
TRANSLATED = tuple(Path("docs", page.name) for page in PAGES if page.parent == Path("docs/zh"))
LANGUAGES = re.compile(r"\[English\]|English · ")


def links(text: str) -> list[str]:
    """Targets inside the repository; code blocks are left out."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", prose)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """Anchors of headings, formed like GitHub's."""
    headings = re.findall(r"^#+ +(.*)$", (ROOT / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def target_of(page: Path, target: str) -> Path:
    path = target.split("#")[0]
    return (ROOT / page.parent / path).resolve().relative_to(ROOT) if path else page


def commands(text: str) -> list[str]:
    """Return the commands in blocks of code, without comments and variables; a quotation may go on in the next line."""
    lines = []
    for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        whole = ""
        for line in block.splitlines():
            whole += re.sub(r" +# .*", "", line).strip() if not whole else f" {line.strip()}"
            if whole.count("'") % 2 == 0:
                lines.append(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", whole).replace("{ ", "{"))
                whole = ""
    return [line for line in lines if re.match(r"(\./|scripts/|python|pip|vllm|curl|\")", line)]


class ComparedLine(NamedTuple):
    """A heading, a line of prose, a row of a table or a block of code, by what both languages share of it."""

    kind: str
    shared: object


def by_hand(text: str) -> str:
    """Return a page without the tables that tools write into it."""
    return re.sub(
        r"^<!-- .* --write: begin -->$.*?^<!-- .* --write: end -->$", "", text, flags=re.DOTALL | re.MULTILINE
    )


def structure(page: Path, text: str = "") -> list[ComparedLine]:
    """Headings, paragraphs, rows of tables and blocks of code in order.

    Shared are of a row each cell's numbers, links and names in backquotes, of a paragraph its links and names, of a
    block of code its commands.
    """
    compared: list[ComparedLine] = []
    blocks = re.split(r"^( *```\n.*?^ *```)$", text or (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for block in blocks:
        if block.lstrip().startswith("```"):
            compared.append(ComparedLine("code", commands(block)))
            continue
        for paragraph in filter(None, map(str.strip, block.split("\n\n"))):
            lines = [line for line in paragraph.splitlines() if not line.startswith("<!--")]
            if not lines:
                continue
            if lines[0].startswith("#"):
                compared.append(ComparedLine("heading", lines[0].split(" ")[0]))
            elif lines[0].startswith("|"):
                compared += [ComparedLine("row", [shared(page, cell) for cell in cells(line)]) for line in lines]
            elif not LANGUAGES.match(lines[0]):
                compared.append(ComparedLine("prose", shared(page, " ".join(lines))))
    return compared


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def shared(page: Path, text: str) -> list[list[str]]:
    """Return what does not depend on the language: links, names, numbers."""
    targets = [link for target in links(text) if (link := one_link(page, target))]
    plain = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
    return [sorted(targets), sorted(re.findall(r"`([^`]+)`", text)), sorted(re.findall(r"\d+(?:\.\w+)*", plain))]


def one_link(page: Path, target: str) -> str:
    """Return a link as both languages have it; headings of translated pages are #. Empty: to this page's other form."""
    if target.startswith("#"):
        return "#"
    path, _, heading = target.partition("#")
    to = original(target_of(page, path))
    if to == original(page):
        return ""
    return f"{to}#{'' if heading and to in TRANSLATED else heading}" if heading else str(to)


def original(page: Path) -> Path:
    """Return the English page of a Chinese one, and any other as it is."""
    if page.parent == Path("docs/zh"):
        return Path("docs", page.name)
    return Path("README.md") if page.name == "README.zh-CN.md" else page
