# SPDX-License-Identifier: Apache-2.0
"""D's scheduler without a rule: its loads and first tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from simulation.mutations import worlds
from simulation.mutations.mutation import Mutation
from vllm_ascend_pd.decode.scheduler.core.first_tokens import TokenBook
from vllm_ascend_pd.decode.scheduler.core.load import LoadEvent, LoadState, RemoteLoad, Start
from vllm_ascend_pd.metadata import Bind, LoadEnd
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken
from vllm_ascend_pd.protocol.identity import TransferId


class EndsSwallowed(TokenBook):
    """D treats a load that failed on some ranks as complete."""

    def ended(self, ends: Iterable[LoadEnd]) -> None:
        super().ended(end for end in ends if end.failure is None)


class EveryAnswerGood(TokenBook):
    """D waits for KV although the metaserver has said that none will come."""

    def answered(self, transfer: TransferId, failure: Failure | None = None) -> None:
        super().answered(transfer)


class NoAnswerGood(TokenBook):
    """D gives a load up although the metaserver has said that P has finished."""

    def answered(self, transfer: TransferId, failure: Failure | None = None) -> None:
        super().answered(transfer, failure or Failure(""))


class ReservedTooLittle(TokenBook):
    """D reserves one token less than it has bound."""

    def reserve(self, *args: Any) -> Bind:
        bind = super().reserve(*args)
        return replace(bind, end=bind.end - 1) if bind.end - bind.first > 1 else bind


class LastTokenLoaded(TokenBook):
    """D loads the prompt's last token, too, and computes it again without what its window needs."""

    def wanted(self, request_id: str, length: int, computed: int, **_caches: bool) -> int:
        return super().wanted(request_id, length, computed)


class AnyToken(TokenBook):
    """D starts with any token that arrives."""

    def token(self, transfer: TransferId, first: FirstToken | None, why: str = "", *, failed: bool = False) -> None:
        load = self._by_transfer.get(transfer)
        if load is not None and load.wanted is not None and first is not None and first.token < load.wanted.vocabulary:
            load.answer = load.answer or msgspec.structs.replace(first, push=load.push or first.push)
        else:
            super().token(transfer, first, why, failed=failed)


class AnyPush(TokenBook):
    """D does not check the push of its KV."""

    def take(self, now: float, *unfit: Any) -> list[Start]:
        for load in self._loads.values():
            if isinstance(load.answer, FirstToken):
                load.answer = msgspec.structs.replace(load.answer, push=load.push)
        return super().take(now, *unfit)


class TokenTakenTwice(TokenBook):
    """A repeated token is output again."""

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self._gone: dict[TransferId, Start] = {}
        self._repeated: list[Start] = []

    def token(self, transfer: TransferId, first: FirstToken | None, why: str = "", *, failed: bool = False) -> None:
        if first is not None and (start := self._gone.get(transfer)) is not None:
            self._repeated.append(start)
        super().token(transfer, first, why, failed=failed)

    def take(self, now: float, *unfit: Any) -> list[Start]:
        ready, repeated = super().take(now, *unfit), self._repeated
        self._gone.update((start.first.transfer, start) for start in ready if start.first is not None)
        self._repeated = []
        return repeated + ready


class LoadsLater(TokenBook):
    """A request that loaded nothing when it was first scheduled loads after a preemption."""

    def loads_nothing(self, request_id: str) -> None:
        """Record nothing."""


class WaitsForEver(TokenBook):
    """D waits without a limit for a missing token."""

    def __init__(self, incarnation: str, *waits: float) -> None:
        super().__init__(incarnation, 1e9, 1e9)


class HeldForgotten(TokenBook):
    """vLLM does not learn that a held request was aborted."""

    _HELD = TokenBook.table[LoadState.HELD]
    table: ClassVar = {
        **TokenBook.table,
        LoadState.HELD: {**_HELD, LoadEvent.ENDED: replace(_HELD[LoadEvent.ENDED], into=LoadState.OVER)},
    }


class BegunWithoutToken(TokenBook):
    """D continues without P's token where it cannot compute the prompt's last token."""

    def take(self, now: float, *unfit: Any) -> list[Start]:
        return [replace(start, fails=False) for start in super().take(now, *unfit)]


class WholeGivenUp(TokenBook):
    """Outside vLLM's read of a step D gives up every token, also one that alone can begin."""

    def received(self, now: float, request_id: str, *, starts: bool = True) -> RemoteLoad | None:
        load = self.find(request_id)
        if load is not None and load.wanted is not None:
            load.wanted = replace(load.wanted, whole=load.wanted.whole and starts)
        return super().received(now, request_id, starts=starts)


MUTATIONS = (
    Mutation("a rank's failure is not received", loads=EndsSwallowed),
    Mutation("every answer is good", loads=EveryAnswerGood),
    Mutation("no answer is good", loads=NoAnswerGood, world=worlds.kind),
    Mutation("a token less is reserved", loads=ReservedTooLittle, world=worlds.kind),
    Mutation("the last token is loaded too", loads=LastTokenLoaded, world=worlds.windows),
    Mutation("any first token is taken", loads=AnyToken, world=worlds.first),
    Mutation("another push's first token is taken", loads=AnyPush, world=worlds.first),
    Mutation("a first token is taken twice", loads=TokenTakenTwice, world=worlds.first),
    Mutation("a first token for a request that has one", loads=LoadsLater, world=worlds.first),
    Mutation("a first token is waited for", loads=WaitsForEver, world=worlds.first),
    Mutation("an aborted request stays held", loads=HeldForgotten, world=worlds.first),
    Mutation("a whole prompt begins without its token", loads=BegunWithoutToken, world=worlds.whole),
    Mutation("a whole prompt's token is given up", loads=WholeGivenUp, world=worlds.whole_unread),
)
