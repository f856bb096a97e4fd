# SPDX-License-Identifier: Apache-2.0
"""All tests in parts, each a pytest run of its own with a record by commit, so that an interrupted run can continue.

A part is a folder of tests, or a file of those that start engines, or a share of a file that takes longer than an hour.
The record is out/all/<commit>/<part>.json, beside the part's output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHOLE = ("unit", "native", "simulation")  # folders that are one part each
BY_FILE = ("integration", "ascend_host")
# Selections (-k) that divide a file. A test belongs to the first that names it, and to one more part if none does.
SHARES = {
    "integration/cover": ("[fp8 or [windows", "[states", "[int8 or [mtp", "[deltanet"),
    "integration/faults_routers": ("[p",),
    "ascend_host/pairs": (
        "older",
        "field",
        "others",
        "sizes and dsa",
        "sizes and (dsv4 or qwen3next)",
        "sizes",
        "shapes and dsa",
        "shapes",
        "switches or dsv4",
        "qwen3next",
        "dsa and mtp",
        "dsa",
        "gqa",
        "mla or mqa",
    ),
    "ascend_host/planted": ("direct", "exchange", "gate"),
}
NOTHING = 5  # pytest's exit code where no test was selected
DEADLINE_MIN = 60.0
GRACE_S = 60.0  # for engines to end


@dataclass(frozen=True)
class PartResult:
    part: str
    exit_code: int
    seconds: float
    words: str  # pytest's last line
    ended: str  # when, UTC

    @property
    def good(self) -> bool:
        return self.exit_code in (0, NOTHING)


def parts(tests: Path) -> dict[str, tuple[str, ...]]:
    """Return the parts' arguments of pytest by name, in the order in which they run."""
    arguments: dict[str, tuple[str, ...]] = {name: (str(tests / name),) for name in WHOLE if (tests / name).is_dir()}
    for folder in BY_FILE:
        for path in sorted((tests / folder).glob("test_*.py")):
            name = f"{folder}/{path.stem.removeprefix('test_')}"
            if name in SHARES:
                for number, words in enumerate(divided(SHARES[name]), 1):
                    arguments[f"{name}-{number}"] = (str(path), "-k", words)
            else:
                arguments[name] = (str(path),)
    return arguments


def divided(selections: Sequence[str]) -> list[str]:
    """Return expressions for -k of which each test fits exactly one."""
    fits = [f"({words})" for words in selections]
    return [
        " and ".join([*(f"not {other}" for other in fits[:number]), *fits[number : number + 1]])
        for number in range(len(fits) + 1)
    ]


def commit(root: Path) -> str:
    """Return the commit of the working tree; uncommitted changes make it another one."""

    def git(*words: str) -> bytes:
        return subprocess.run(("git", "-C", str(root), *words), check=True, capture_output=True).stdout

    try:
        head = git("rev-parse", "--short=12", "HEAD").decode().strip()
        changed = git("diff", "HEAD") + git("ls-files", "--others", "--exclude-standard")
    except (OSError, subprocess.CalledProcessError):
        return "no-commit"
    return f"{head}-{hashlib.sha256(changed).hexdigest()[:8]}" if changed else head


class PartRecord:
    """Results by part, in a folder for the commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def log(self, part: str) -> Path:
        return self.folder / f"{part.replace('/', '-')}.log"

    def of(self, part: str) -> PartResult | None:
        try:
            return PartResult(**json.loads(self.log(part).with_suffix(".json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def elsewhere(self, part: str) -> tuple[str, PartResult] | None:
        """Return the newest good result of other commits, with its commit."""
        others = (PartRecord(folder) for folder in self.folder.parent.glob("*") if folder != self.folder)
        results = [(other.folder.name, result) for other in others if (result := other.of(part)) and result.good]
        return max(results, key=lambda one: one[1].ended, default=None)

    def add(self, result: PartResult) -> None:
        self.log(result.part).with_suffix(".json").write_text(json.dumps(asdict(result), indent=1))


def run(part: str, record: PartRecord, words: Sequence[str], deadline_s: float) -> PartResult:
    """Run one part to its end or its deadline; its output goes into the record."""
    log = record.log(part)
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    code = pytest_run(words, log, deadline_s)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1].strip("= ") if lines else "it said nothing"
    ended = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    result = PartResult(part, code, time.monotonic() - begun, said, ended)
    record.add(result)
    return result


def pytest_run(words: Sequence[str], log: Path, deadline_s: float) -> int:
    """Run pytest to its end or its deadline, into a log. Return its exit code; 124 after the deadline."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            (sys.executable, "-m", "pytest", "-q", "--skips", "listed", *words),
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=_heed_interrupts,  # noqa: PLW1509  this program has one thread
        )
        try:
            return process.wait(deadline_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as cut:
            code = _end(process)
            if isinstance(cut, KeyboardInterrupt):
                raise
            return code


def _heed_interrupts() -> None:
    """Undo what a shell does to its background jobs: they ignore SIGINT, and so would pytest."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes]) -> int:
    """End pytest as ctrl-C does, so that fixtures stop their engines; kill what is left after a grace period."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return 124


def line(part: str, result: PartResult) -> str:
    state = "good" if result.good else f"FAILED ({result.exit_code})"
    return f"{part:28} {state:13} {result.seconds / 60:6.1f} min  {result.ended}  {result.words}"


def missing(part: str, record: PartRecord) -> str:
    """Return the line of a part without a result on this commit."""
    said, newest = f"{part:28} has not run on this commit", record.elsewhere(part)
    return f"{said}; good on {newest[0]}, {newest[1].seconds / 60:.1f} min, {newest[1].ended}" if newest else said


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/test.sh --parts", description="Runs the parts that have no good result on this commit."
    )
    parser.add_argument("part", nargs="*", help="run only these, even if they were good; default: all")
    parser.add_argument("--list", action="store_true", help="print the parts and their records")
    parser.add_argument(
        "--minutes",
        type=float,
        default=DEADLINE_MIN,
        help="longest time of a part (%(default)g); a slow machine may need more",
    )
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "all", help=argparse.SUPPRESS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a background job ignores ctrl-C
    known = parts(args.tests)
    if os.environ.get("PD_ASCEND_HOST") == "0":
        known = {name: words for name, words in known.items() if not name.startswith("ascend_host/")}
    if strange := [name for name in args.part if name not in known]:
        parser.error(f"no part {', '.join(strange)}; there are {', '.join(known)}")
    record = PartRecord(args.out / commit(ROOT))
    chosen = args.part or [name for name in known if not ((one := record.of(name)) and one.good)]
    if not args.list:
        for number, name in enumerate(chosen, 1):
            print(f"[{number} of {len(chosen)}] {name} …", flush=True)
            spread = ("-n", str(min(os.cpu_count() or 1, 4))) if name == "unit" else ()
            print(line(name, run(name, record, (*spread, *known[name]), args.minutes * 60)), flush=True)
    results = {name: record.of(name) for name in known}
    print(f"\n{record.folder.name}:")
    for name, result in results.items():
        print(line(name, result) if result else missing(name, record))
    good = sum(result is not None and result.good for result in results.values())
    minutes = sum(result.seconds for result in results.values() if result is not None) / 60
    print(f"{good} of {len(results)} parts good, {minutes:.0f} min in all; output in {record.folder}")
    if left_out := os.environ.get("PD_LEFT_OUT"):  # of such parts the record says that they are good
        print(f"LEFT OUT: {left_out}")
    return 0 if args.list or all((one := record.of(name)) and one.good for name in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
