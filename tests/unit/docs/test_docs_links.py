# SPDX-License-Identifier: Apache-2.0
"""Every link of every page has a target, and the README links to every page."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.matrix import MARKS
from unit.docs.pages import (
    PAGES,
    ROOT,
    anchors,
    cells,
    commands,
    links,
    original,
    structure,
    target_of,
)

READMES = (Path("README.md"), Path("README.zh-CN.md"))
SCREEN = 50  # lines
LONGEST_CELL = 300
SCRIPTS = ("./scripts/quickstart.sh", "./scripts/test.sh")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links((ROOT / page).read_text()):
        linked_page = target_of(page, target)
        assert (ROOT / linked_page).exists(), f"{page} links to {target}"
        if "#" in target:
            assert target.split("#")[1] in anchors(linked_page), f"{page} links to {target}"


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
    one, other = ({original(target_of(page, link)) for link in links((ROOT / page).read_text())} for page in READMES)
    assert one - set(READMES) == other - set(READMES)


def test_commands_in_both_readmes_are_the_same() -> None:
    one, other = (commands((ROOT / page).read_text()) for page in READMES)
    assert one == other
    assert [line.split()[0] for line in one] == ["pip", "vllm", "vllm", "vllm-ascend-pd", "curl", *SCRIPTS]


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_the_readmes_five_lines_are_those_that_are_explained(readme: Path) -> None:
    page = commands((ROOT / "docs" / "start.md").read_text())
    ours = commands((ROOT / readme).read_text())
    assert [line for line in ours if line.startswith(("vllm", "curl"))] == page[-4:]


def test_both_readmes_have_the_same_structure() -> None:
    one, other = map(structure, READMES)
    assert one == other
    assert sum(line.kind == "row" for line in one) > 35


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_the_readme_is_three_sentences_a_picture_a_start_a_comparison_what_ran_and_links(readme: Path) -> None:
    text = (ROOT / readme).read_text()
    parts = re.split(r"^#+ .*$", text, flags=re.MULTILINE)
    kinds = [kind for kind, _ in itertools.groupby(line.kind for line in structure(readme))]
    assert len(parts) == 7, "the title, then the picture, the start, the comparison, what ran where, the links"
    _, beginning, picture, start, compared, ran, listed = parts
    wanted = (
        "heading prose heading prose heading code prose code heading row prose heading row prose row heading row prose"
    )
    assert kinds == wanted.split()
    sentences = re.findall(r"[^.。]+(?:\.(?!\s|$)[^.。]*)*[.。](?=\s|$)", beginning.strip().partition("\n\n")[2])
    assert len(sentences) == 3, sentences
    assert "](docs/path.svg)" in picture and len(commands(start)) == 7
    names = ("AscendPushConnector", "MooncakeLayerwiseConnector", "MooncakeConnector", "NixlConnector")
    assert cells(next(line for line in compared.splitlines() if line[:1] == "|"))[1:] == list(names)
    assert MARKS.begin in ran and MARKS.end in ran and "`scripts/npu_selfcheck.sh`" in ran
    assert len(links(listed)) > 20 and "docs/runbook.md" in links(listed)


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_what_the_comparison_measures_is_what_the_runs_printed(readme: Path) -> None:
    """The figures of README's table stand in the generated tables and outputs that it names."""
    text = (ROOT / readme).read_text()
    rows = [cells(line) for line in text.splitlines() if line.startswith("|")][2:9]
    killed, first, warm = rows[1], rows[5], rows[6]
    migration, kinds, performance = (
        (ROOT / "docs" / f"{page}.md").read_text() for page in ("migration", "kinds", "performance")
    )
    ran = {cells(line)[0]: cells(line)[1:] for line in migration.splitlines() if line.startswith("|")}
    during = ran["P killed during its prefill"]
    assert "62 s" in during[0] and "62 s" in killed[1] and "90 s" in during[1] and "90 s" in killed[2]
    assert during[2].startswith("HTTP 500") and killed[3] == "HTTP 500"
    assert first[1:4] == ran["TP 1 → 1: median time to the first token, 1500 tokens"]
    (cached,) = re.findall(
        r"^ *2048, 0 on D +\d+ \(\S+\) +(\d+) \(\S+\) +(\d+) \(\S+\) +(\d+) \(.*NOT MET", performance, re.MULTILINE
    )[:1]
    mooncake, nixl, ours = cached
    assert (warm[1], warm[3], warm[4]) == (f"{ours} ms", f"{mooncake} ms", f"{nixl} ms")
    table = kinds.split("## Beside vLLM's own connectors")[1].split("<!--")[1]
    of_kinds = [cells(line) for line in table.splitlines() if line.startswith("|")][2:]
    wrong = [{row[0] for row in of_kinds if "**wrong**" in row[column]} for column in (1, 3, 2)]
    assert len(of_kinds) == 13 and "13" in rows[0][0]
    assert [len(kinds) for kinds in wrong] == [0, 2, 2]
    assert all(any(name in kind for kind in wrong[1]) for name in ("gpt-oss", "Mamba-2")), rows[0][3]
    assert all(any(name in kind for kind in wrong[2]) for name in ("gpt-oss", "Gemma-3")), rows[0][4]


def test_the_picture_is_read_in_light_and_dark() -> None:
    """A picture of a README has no page around it: its own style has both sets of colours, and it has a title."""
    root = ElementTree.parse(ROOT / "docs" / "path.svg").getroot()
    style = "".join(root.itertext())
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for selector in ("text {", ".b {", ".a {", ".k {", "#h path {"):
        assert selector in light and selector in dark, selector
    steps = re.findall(
        r"\b(\d) [^\W\d]", " ".join(each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text"))
    )
    assert steps == [str(number) for number in range(1, 10)]
    assert root.find("{http://www.w3.org/2000/svg}title") is not None


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_the_readme_is_short_and_so_is_each_cell(readme: Path) -> None:
    lines = (ROOT / readme).read_text().splitlines()
    assert len(lines) <= 110
    assert not [cell for line in lines if line.startswith("|") for cell in cells(line) if len(cell) > LONGEST_CELL]


NOT_SHOWN = {
    "README.md": ("bisheng", "HCCL's and Mooncake's Ascend transports", "timing", "registration of device memory", "graph capture on a device"),
    "README.zh-CN.md": ("bisheng", "HCCL 和 Mooncake 的昇腾传输", "时间性能", "设备内存的注册", "设备上的图捕获"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("readme", "in_host_memory", "silicon"),
    [
        ("README.md", "vllm-ascend's own code on a CANN in host memory", "**nothing on silicon**"),
        ("README.zh-CN.md", "自己的代码，在主机内存中的 CANN 上", "**没有任何内容在芯片上运行过**"),
    ],
)
def test_what_ran_on_a_cann_in_host_memory_says_what_it_does_not_show(
    readme: str, in_host_memory: str, silicon: str
) -> None:
    lines = (ROOT / readme).read_text().splitlines()
    stand_in, newest, npu = [cells(line) for line in lines if line.startswith(("| 0.23.0 |", "| 0.30.0 |"))]
    assert (stand_in[1], newest[1], npu[1]) == ("0.23.0.post1", "0.30.0rc2", "0.30.0rc2")
    assert in_host_memory in stand_in[-1]
    assert all(name in stand_in[-1].partition("**")[2] for name in NOT_SHOWN[readme])
    assert npu[-1] == silicon


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


def test_the_table_of_decisions_has_each_with_its_heading_and_status() -> None:
    folder = ROOT / "docs" / "decisions"
    table = (folder / "README.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| \[(.+)\]\(([\w-]+)\.md\) \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) == table.count("\n| ") - 1, "each row is read"
    of_files = set()
    for page in folder.glob("*.md"):
        if page.name != "README.md":
            heading, status, *_ = page.read_text().splitlines()
            of_files.add((heading.removeprefix("# "), page.stem, status.removeprefix("Status: ").rstrip(".")))
    assert set(rows) == of_files and len(rows) == len(of_files) > 60
