# SPDX-License-Identifier: Apache-2.0
"""scripts/fuzz.sh on a small scale: no crash, nothing kept, no forgery accepted; and it detects violations of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from tools import fuzz
from tools.support import fuzz_targets
from tools.support.fuzz_targets import ACCEPTED, READ, REFUSED, TARGETS, FuzzTarget
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.protocol.auth import unseal
from vllm_ascend_pd.protocol.messages import Message

INPUTS = 40_000


@pytest.fixture(scope="module")
def ends() -> dict[str, dict[str, int]]:
    return {name: dict(counts) for name, counts in fuzz.run([], INPUTS, seed=2026, progress_s=1e9).items()}


def test_no_decoder_crashes_and_nothing_forged_is_accepted(ends: dict[str, dict[str, int]]) -> None:
    assert sum(sum(counts.values()) for counts in ends.values()) >= INPUTS * 0.99
    assert not [name for name, counts in ends.items() if counts.get(ACCEPTED)]


@pytest.mark.parametrize("name", [target.name for target in TARGETS])
def test_every_target_sees_both_good_and_bad(ends: dict[str, dict[str, int]], name: str) -> None:
    """A mutator that breaks everything at the first byte would test the first check only."""
    if name not in ("signed", "sealed", "sources"):  # these accept unchanged input only
        assert ends[name].get(READ, 0) > 0
    if name != "doorbell":
        assert ends[name].get(REFUSED, 0) > 0


def test_every_message_is_among_what_is_mutated() -> None:
    assert {type(message) for message in fuzz_targets.messages()} == set(get_args(Message))


def test_inputs_can_be_made_again() -> None:
    target = TARGETS[0]
    whole = fuzz.fuzz(target, 50, seed=3)
    parts = [fuzz.fuzz(target, 1, 3, number) for number in range(50)]
    assert whole == sum(parts[1:], parts[0])


def _target(run: Callable[[bytes], str]) -> FuzzTarget:
    return FuzzTarget("broken", "a decoder with a mistake", 1, lambda: [b"example"], lambda: run)


def test_a_crash_is_noticed_with_what_it_takes_to_find_it_again() -> None:
    def run(data: bytes) -> str:
        raise KeyError(data[:1])

    with pytest.raises(fuzz.FuzzFinding, match="--target broken --seed 5 --only 0"):
        fuzz.fuzz(_target(run), 3, seed=5)


def test_an_input_that_takes_too_long_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SLOW_S", -1.0)
    with pytest.raises(fuzz.FuzzFinding, match="took more than"):
        fuzz.fuzz(_target(lambda data: READ), 1, seed=5)


def test_something_forged_that_is_believed_ends_the_command_badly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: a verifier that compares one byte only."""

    def trusting(data: bytes) -> str:
        try:
            unseal(data, None)
        except RemoteProtocolError:
            return REFUSED
        return ACCEPTED

    sealed = next(target for target in TARGETS if target.name == "reservation")
    monkeypatch.setattr(fuzz, "TARGETS", (replace(sealed, start=lambda: trusting),))
    assert fuzz.main(["--inputs", "2000"]) == 1
    assert "forged ones accepted" in capsys.readouterr().out


def test_the_targets_are_all_that_reads_from_a_socket() -> None:
    """Every new decoder needs a target."""
    assert {target.name for target in TARGETS} == {
        *("frames", "greeting", "messages", "signed", "listener", "doctor", "sealed", "reservation"),
        *("sources", "schedulers", "bootstrap"),
        *("http answers", "http requests", "bodies", "posts", "ndjson", "doorbell"),
    }
    assert fuzz_targets.SECRETS.current not in repr(fuzz_targets.SECRETS).encode()
