# SPDX-License-Identifier: Apache-2.0
"""Choice by the prompts that an engine was sent before, and by the models that it lists."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.support.checks import front_counter
from unit.router.cluster import HEAD, FakeCluster, cluster, until
from unit.router.fake_engine import ids_of
from vllm_ascend_pd.protocol.identity import incarnation
from vllm_ascend_pd.router import models
from vllm_ascend_pd.router.core.decisions import ProcessHistory
from vllm_ascend_pd.router.core.prefixes import FAR, FINE, LEAST, MAX_BYTES, NEAR, Marks, Prompts, marks_of


def marks(prompt: bytes, *parts: bytes) -> Marks:
    return marks_of(parts, prompt, len(prompt) // 4)


# ---- marks


@given(st.binary(max_size=3 * NEAR), st.binary(max_size=3 * NEAR), st.binary(max_size=3 * NEAR))
def test_prompts_have_the_marks_in_common_that_their_common_beginning_has(
    head: bytes, one: bytes, other: bytes
) -> None:
    first, second = (marks(head + rest) for rest in (one, other))
    common = next((i for i, (a, b) in enumerate(zip(head + one, head + other, strict=False)) if a != b), len(head))
    for a, b in list(zip(first, second, strict=False))[: common // NEAR]:
        assert a.digest == b.digest
    apart = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a.digest != b.digest), None)
    if apart is not None:
        assert not {m.digest for m in first[apart:]} & {m.digest for m in second[apart:]}


def test_what_is_sent_beside_the_prompt_cannot_be_mistaken_for_another_part() -> None:
    prompt = b"x" * NEAR
    assert marks(prompt, b"ab", b"c")[0].digest != marks(prompt, b"a", b"bc")[0].digest


def test_a_long_prompt_has_few_marks() -> None:
    prompt = b"1234, " * (MAX_BYTES // 3)
    prompt_marks = marks_of((), prompt, len(prompt) // 6)
    assert len(prompt_marks) == FINE // NEAR + (MAX_BYTES - FINE) // FAR
    assert prompt_marks[-1].tokens == MAX_BYTES // 6


# ---- what an engine is thought to have


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=30), st.integers(0, 4000))
def test_it_holds_no_more_than_it_may_and_forgets_ends_before_beginnings(
    asked: list[tuple[int, int]], most: int
) -> None:
    prompts = Prompts(most)
    for kind, length in asked:
        of = marks(bytes([kind]) * (NEAR * length))
        prompts.add(of)
        kept = [mark.digest in prompts.entries for mark in of]
        assert kept == sorted(kept, reverse=True), "a beginning went before its end"
        assert prompts.has(of) == (of[sum(kept) - 1].tokens if any(kept) else 0)
        assert prompts.tokens == sum(mark.added for mark in prompts.entries.values()) <= most


def test_prompts_of_few_tokens_do_not_pile_up() -> None:
    """Two token ids in a body of blanks have marks, most of them without a token more than the one before."""
    prompts, of = Prompts(4000), Marks()
    for turn in range(100):
        of = marks_of((), b"[%d," % turn + b" " * FINE + b"1]", 2)
        prompts.add(of)
    assert len(prompts.entries) <= 4000 // LEAST and prompts.tokens <= 4000
    assert prompts.has(of) == of[-1].tokens, "the last one is there"


@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 9)), max_size=40), st.integers(9, 20))
def test_with_what_the_engine_tells_it_is_known_what_is_there(asked: list[tuple[int, int]], most: int) -> None:
    """An engine that keeps the `most` blocks used last. A prompt of kind -1 is new and comes by another way."""
    block = NEAR // 4
    prompts, engine = Prompts(most * block), dict[tuple[int, int], None]()
    longest: dict[int, Marks] = {}
    for turn, (kind, length) in enumerate(asked):
        if kind >= 0:
            of = marks(bytes([kind]) * (NEAR * length))
            prompts.add(of)
            longest[kind] = max(longest.get(kind, ()), of, key=len)
        before = set(engine)
        for place in range(length - 1, -1, -1):
            used = (kind if kind >= 0 else -1 - turn, place)
            engine.pop(used, None)
            engine[used] = None
        came = len(set(engine) - before)
        gone = list(engine)[: max(0, len(engine) - most)]
        for last in gone:
            del engine[last]
        prompts.update(block * came, block * len(engine), lost=bool(gone))
        for known, its in longest.items():
            there, kinds = block * sum(owner == known for owner, _ in engine), [kind for kind, _ in asked[: turn + 1]]
            if -1 not in kinds:
                assert prompts.has(its) == there
            elif all(kinds.count(kind) == 1 for kind in kinds if kind >= 0):  # a repeated one may hide those between
                assert prompts.has(its) <= there
            assert prompts.tokens <= block * len(engine)


def test_an_engine_that_forgets_is_heard_as_before() -> None:
    """Entries forgotten for another reason than its events do not change how these count."""
    prompts, block = Prompts(1000), NEAR // 4
    for turn in range(20):
        prompts.add(marks(bytes([turn]) * 4 * NEAR))
        prompts.update(4 * block, min(10, 4 * turn + 4) * block, lost=turn > 1)
        if turn == 10:
            prompts.forget()
            assert not prompts.tokens
    assert prompts.has(marks(bytes([19]) * 4 * NEAR)) == 4 * block and prompts.tokens == 10 * block


def test_what_was_sent_last_stays() -> None:
    prompts = Prompts(4 * NEAR // 4)
    old, new = marks(b"o" * 3 * NEAR), marks(b"n" * 3 * NEAR)
    prompts.add(old)
    prompts.add(new)
    assert prompts.has(new) == 3 * NEAR // 4 and prompts.has(old) == NEAR // 4


@pytest.mark.parametrize(
    ("later", "gone"),
    [
        (ProcessHistory().reported("b", 2.0), True),
        (ProcessHistory().reported("a", 2.0), False),
        (ProcessHistory().reported("a", 1.0).refuses(3.0), True),
        (ProcessHistory().reported("a", 1.0).reported(incarnation("r", 1), 2.0), False),
    ],
)
def test_a_life_that_ended_took_its_cache_along(later: ProcessHistory, gone: bool) -> None:
    assert later.restarted_since(ProcessHistory().reported("a", 1.0)) is gone


# ---- in the service


def generations(c: FakeCluster) -> list[int]:
    return [len(p.generations()) for p in c.prefill]


def test_turns_of_a_conversation_go_where_the_last_one_was() -> None:
    with cluster(prefill=3, decode=2) as c:
        talks = {name: f"{name} {HEAD}" for name in "ab"}
        for _ in range(4):
            for name in talks:
                assert c.complete(talks[name]).status_code == 200
                talks[name] += HEAD
        for engines, form in ((c.prefill, ids_of), (c.decode, str)):
            for name in "ab":
                head = form(f"{name} {HEAD}")[:3]
                had = [e for e in engines if any(s.body["prompt"][:3] == head for s in e.generations())]
                assert len(had) == 1, "one conversation, one engine"


def test_by_load_alone_it_may_go_anywhere() -> None:
    with cluster(prefill=3, prefix_tokens=0) as c:
        for _ in range(40):
            c.complete(HEAD)
        assert all(generations(c))


def test_a_busy_p_does_not_get_what_another_can_compute_sooner() -> None:
    with cluster(prefill=2) as c:
        c.complete(HEAD)
        home = c.prefill[generations(c).index(1)]
        other = next(p for p in c.prefill if p is not home)
        busy = c.worker.fleet.get(home.address)
        assert busy is not None
        until(lambda: not busy.requests)  # P's own answer, which ends its load, may come after the client's
        busy.load = 10_000.0
        c.complete(HEAD + " again")
        assert len(other.generations()) == 1


def test_a_p_that_was_started_anew_has_nothing() -> None:
    with cluster(prefill=1) as c:
        c.complete(HEAD)
        instance = c.worker.fleet.get(c.prefill[0].address)
        assert instance is not None and instance.prompts.tokens > 0
        until(lambda: not instance.requests)  # it has reported its old name
        c.prefill[0].incarnation = "another"
        c.complete("short")
        until(lambda: any(word.incarnation == "another" for word in instance.history.statements))
        assert instance.cached_tokens(marks_of((), HEAD.encode(), 900)) == 0 and instance.prompts.tokens == 0


def test_engines_that_are_asked_to_forget_count_as_having_forgotten() -> None:
    with cluster() as c:
        c.complete(HEAD)
        assert all(instance.prompts.tokens for instance in c.worker.fleet)
        c.http.post("/reset_prefix_cache", json={})
        assert not any(instance.prompts.tokens for instance in c.worker.fleet)


def test_d_computes_what_is_short_or_in_its_cache_alone_where_that_is_wanted() -> None:
    with cluster(decode_alone=200) as c:
        before = counted(c, "short"), counted(c, "cached")
        assert c.complete("short").status_code == 200 and not c.legs()
        assert c.complete(HEAD).status_code == 200 and len(c.legs()) == 1
        assert c.complete(HEAD).status_code == 200 and len(c.legs()) == 1, "all but the last bytes are in D's cache"
        assert c.complete(HEAD + "x" * 2000).status_code == 200 and len(c.legs()) == 2
        assert (counted(c, "short"), counted(c, "cached")) == (before[0] + 1, before[1] + 1)


def test_what_d_computes_because_no_p_is_usable_is_counted() -> None:
    with cluster(prefill=0) as c:
        before = counted(c, "no prefill")
        assert c.complete("alone").status_code == 200
        assert counted(c, "no prefill") == before + 1


def counted(c: FakeCluster, why: str) -> float:
    return front_counter(str(c.http.base_url), "decode_alone", f'why="{why}"')


# ---- models


def two_models(c: FakeCluster) -> None:
    """A cluster in which half of the engines serve another model, and the metaserver knows it."""
    for engine in (c.prefill[1], c.decode[1]):
        engine.models, engine.fingerprint = ("other",), "0123456789ab.v2-2"
    for engine in (*c.prefill, *c.decode):
        instance = c.worker.fleet.get(engine.address)
        assert instance is not None
        until(lambda instance=instance, engine=engine: set(instance.cards or ()) == set(engine.models))


def test_a_request_goes_to_the_engines_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ascend_pd.router.probes.MODELS_EVERY_S", 0.05)
    with cluster(prefill=2, decode=2) as c:
        two_models(c)
        for model, mine in (("fake", 0), ("other", 1)):
            for i in range(6):
                assert c.complete(f"{model} {i}", model=model).status_code == 200
            assert [len(d.generations()) for d in c.decode][mine] == 6
            assert generations(c)[mine] == 6
        assert c.complete("x", model="neither").status_code == 404
        for model in ("fake", "other"):
            answer = c.http.post("/v1/embeddings", json={"model": model, "input": "x"})
            served = next(d for d in c.decode if model in d.models)
            assert answer.status_code == 200 and served.seen[-1].route == "/v1/embeddings"
            assert c.http.get(f"/v1/models/{model}").status_code == 200
            assert served.seen[-1].route == f"/v1/models/{model}"


def test_the_models_of_all_are_listed_to_clients_that_may_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ascend_pd.router.probes.MODELS_EVERY_S", 0.05)
    with cluster(prefill=2, decode=2) as c:
        two_models(c)
        assert names(c.http.get("/v1/models")) == ["fake", "other"]
        status = {i["name"]: i["models"] for i in c.http.get("/status").json()["instances"]}
        assert sorted(status[d.address][0] for d in c.decode) == ["fake", "other"]
        for d in c.decode:
            d.usual.status = 401
        assert c.http.get("/v1/models").status_code == 401, "the engines' keys are not ours to wave through"


def test_a_d_whose_model_no_p_has_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ascend_pd.router.probes.MODELS_EVERY_S", 0.05)
    with cluster(prefill=1, decode=2) as c:
        c.decode[1].models = ("other",)
        instance = c.worker.fleet.get(c.decode[1].address)
        assert instance is not None
        until(lambda: "other" in (instance.cards or ()))
        assert c.complete("x", model="other").status_code == 200 and not c.legs()


def names(answer: httpx.Response) -> list[str]:
    return sorted(card["id"] for card in answer.json()["data"])


@pytest.mark.parametrize(
    "said", [b"", b"no JSON", b"{}", b'{"data": 1}', b'{"data": [{"name": "x"}]}', b'{"data": [7]}']
)
def test_a_list_that_is_none_names_no_model(said: bytes) -> None:
    assert models.cards_of(said) == {}
