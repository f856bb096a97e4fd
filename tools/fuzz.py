# SPDX-License-Identifier: Apache-2.0
"""Mutated bytes for every decoder that reads from a socket.

Each target takes valid examples, mutates them, and feeds them to its decoder. A rule is broken by any exception but
the decoder's own, by memory beyond the bound, by an input that takes longer than SLOW_S, or if something forged is
accepted. Seed and number reproduce an input: `--seed S --target T --only N`.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.support.fuzz_targets import TARGETS, ExampleShape, FuzzTarget

SLOW_S = 2.0  # for one input; slack for a busy machine
GROWTH_BYTES = 300 << 20  # of the whole process, over all inputs of all targets
LONGEST = 1 << 16
EXTREME: tuple[Any, ...] = (
    *(0, 1, -1, 2, 16, 1023, 1024, 65535, 65536, 2**31, 2**62 - 1, 2**62, 2**63 - 1, -(2**63), 2**64 - 1),
    *(0.0, -1.0, 1e300, float("nan"), float("inf"), True, None, "", "x", "x" * 65, "x" * 2000, "layer.0", "p"),
    *([], {}, [[]], [0] * 500, [1, "a"], {"a": 1}, [["layer.0"], ["layer.1"]]),
)
INTERESTING = (0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xC7, 0xDB, 0xDD, 0xDF, 0xFF, 10, 13, 34, 44, 58, 91, 92, 93, 123, 125)


class FuzzFinding(Exception):
    """An input broke a rule."""


@dataclass(slots=True)
class Mutator:
    """Mutations of examples. All randomness is from one generator, so that an input can be reproduced."""

    examples: list[bytes]
    shape: ExampleShape | None
    rng: random.Random

    def next(self) -> bytes:
        if self.shape is not None and self.rng.random() < 0.5:
            return self.reshaped(self.shape, self.rng.choice(self.examples))
        data = bytearray(self.rng.choice(self.examples))
        for _ in range(self.rng.choice((1, 1, 1, 2, 4, 16))):
            self.rng.choice(_WAYS)(self, data)
        return bytes(data[:LONGEST])

    def reshaped(self, shape: ExampleShape, example: bytes) -> bytes:
        """Return the example, well-formed, with another value somewhere, which a byte-level decoder accepts."""
        value = shape.read(example[shape.skip :])
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            value = self.changed(value)
        return example[: shape.skip] + shape.write(value)

    def changed(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self.rng.random() < 0.9:
            key = self.rng.choice(list(value))
            if self.rng.random() < 0.05:
                return {other: each for other, each in value.items() if other != key}
            return {**value, key: self.changed(value[key])}
        if isinstance(value, list) and value and self.rng.random() < 0.8:
            at = self.rng.randrange(len(value))
            if self.rng.random() < 0.1:
                return value[:at] + value[at : at + 1] * self.rng.choice((0, 2, 300)) + value[at + 1 :]
            return [*value[:at], self.changed(value[at]), *value[at + 1 :]]
        if isinstance(value, int) and self.rng.random() < 0.5:
            return max(-(2**63), min(value + self.rng.choice((-16, -1, 1, 16, 1000, value)), 2**64 - 1))
        if isinstance(value, bytes):
            return self.rng.randbytes(self.rng.choice((0, 1, 4, 12, 12, 400)))
        return self.rng.choice(EXTREME)

    def at(self, data: bytearray) -> int:
        return self.rng.randrange(len(data)) if data else 0

    def flip(self, data: bytearray) -> None:
        if data:
            data[self.at(data)] ^= 1 << self.rng.randrange(8)

    def set(self, data: bytearray) -> None:
        if data:
            data[self.at(data)] = self.rng.choice(INTERESTING)

    def cut(self, data: bytearray) -> None:
        del data[self.at(data) :]

    def drop(self, data: bytearray) -> None:
        at = self.at(data)
        del data[at : at + self.rng.randint(1, 8)]

    def insert(self, data: bytearray) -> None:
        at = self.at(data)
        data[at:at] = self.rng.randbytes(self.rng.choice((1, 2, 4, 8, 64)))

    def repeat(self, data: bytearray) -> None:
        at, size = self.at(data), self.rng.choice((1, 4, 32, 256))
        data[at:at] = data[at : at + size] * self.rng.choice((1, 2, 8, 64))

    def splice(self, data: bytearray) -> None:
        other = self.rng.choice(self.examples)
        at = self.rng.randrange(len(other) + 1)
        data[self.at(data) :] = other[at:]

    def number(self, data: bytearray) -> None:
        """Set a length, a count or an address to an extreme value."""
        at, size = self.at(data), self.rng.choice((1, 2, 4, 8))
        value = self.rng.choice((0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), self.rng.getrandbits(8 * size)))
        data[at : at + size] = value.to_bytes(size, "big")

    def nest(self, data: bytearray) -> None:
        at = self.at(data)
        data[at:at] = self.rng.choice((b"[", b'{"a":', b"\x91", b"\x81\xa1a")) * self.rng.choice((2, 100, 3000))


_WAYS: tuple[Callable[[Mutator, bytearray], None], ...] = (
    *(Mutator.flip, Mutator.flip, Mutator.set, Mutator.cut, Mutator.drop, Mutator.insert, Mutator.repeat),
    *(Mutator.splice, Mutator.number, Mutator.number, Mutator.nest),
)


def fuzz(target: FuzzTarget, inputs: int, seed: int, first: int = 0) -> Counter[str]:
    """Feed `inputs` mutations, and count their results. Raise FuzzFinding for a broken rule."""
    results: Counter[str] = Counter()
    examples = target.examples()
    run = target.start()
    for number in range(first, first + inputs):
        data = Mutator(examples, target.shape, random.Random(f"{seed}/{target.name}/{number}")).next()
        began = time.perf_counter()
        try:
            results[run(data)] += 1
        except Exception as error:
            where = f"--target {target.name} --seed {seed} --only {number}"
            raise FuzzFinding(f"{type(error).__name__}: {error}\n{data[:200]!r}\nscripts/fuzz.sh {where}") from error
        if time.perf_counter() - began > SLOW_S:
            raise FuzzFinding(
                f"{target.name}: input {number} of seed {seed} took more than {SLOW_S:g} s\n{data[:200]!r}"
            )
    return results


def run(names: list[str], inputs: int, seed: int, progress_s: float = 5.0) -> dict[str, Counter[str]]:
    """Run all targets with their shares of the inputs."""
    chosen = [target for target in TARGETS if not names or target.name in names]
    weight = sum(target.weight for target in chosen)
    total: dict[str, Counter[str]] = {}
    began = said = time.monotonic()
    done = 0
    for target in chosen:
        left = max(1, round(inputs * target.weight / weight))
        total[target.name] = Counter()
        while left:
            some = min(left, 500)
            total[target.name] += fuzz(target, some, seed, first=sum(total[target.name].values()))
            left -= some
            done += some
            if time.monotonic() - said > progress_s:
                said = time.monotonic()
                print(f"{done}/{inputs} inputs, {done / (said - began):.0f}/s, now: {target.name}", flush=True)
    return total


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz.sh", description="Mutated bytes for every decoder behind a socket.")
    parser.add_argument("--inputs", type=int, default=20_000, help="inputs in all (default 20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", default=[], choices=[target.name for target in TARGETS])
    parser.add_argument("--only", type=int, help="with one target: only the input of this number")
    args = parser.parse_args(argv)
    if args.only is not None:
        [target] = (target for target in TARGETS if [target.name] == args.target)
        print(fuzz(target, 1, args.seed, args.only))
        return 0
    try:
        run(args.target, 200, args.seed + 1)  # allocates what every decoder needs once, before memory is measured
        before, cpu = peak_bytes(), time.process_time()
        total = run(args.target, args.inputs, args.seed)
    except FuzzFinding as broken:
        print(f"BROKEN: {broken}")
        return 1
    grown = peak_bytes() - before
    for target in TARGETS:
        if target.name in total:
            ends = ", ".join(f"{count} {what}" for what, count in total[target.name].most_common())
            print(f"  {target.name:<20} {target.what}: {ends}")
    count = sum(sum(ends.values()) for ends in total.values())
    accepted = sum(ends["accepted"] for ends in total.values())
    print(
        f"{count} inputs in {time.process_time() - cpu:.0f} s of one core, 0 crashes, {accepted} forged ones accepted,"
    )
    print(f"the process grew by {grown / 2**20:.0f} MiB")
    return 0 if accepted == 0 and grown < GROWTH_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
