# SPDX-License-Identifier: Apache-2.0
"""A client that talks to an engine directly, with forged parameters: it gets a plain prefill, and nothing else.

Real connectors of both roles, driven with vLLM's own requests. Whatever the parameters are, no exception comes out
(it would end the engine core), no byte of D's memory changes, no connection is opened, and valid requests go on.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from unit.kits.connectors import TOKENS, Blocks, ConnectorPair, connected_pair, connector, output, request, tensors
from unit.kits.watching import until
from vllm_ascend_pd.connector import AscendPushConnector
from vllm_ascend_pd.protocol.auth import Secrets, seal, unseal
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.reservation_format import as_sent

SECRET = Secrets(b"k" * 32)
HUGE = list(range(200_000))


_names = itertools.count()


@pytest.fixture(scope="module")
def pair() -> Iterator[ConnectorPair]:
    """One pair for all tests: side effects of a forgery would show in the next one."""
    with pytest.MonkeyPatch.context() as environment, connected_pair() as made:
        environment.delenv("VLLM_HOST_IP", raising=False)
        yield made


@pytest.fixture(scope="module")
def valid(pair: ConnectorPair) -> Reservation:
    """A real reservation of D."""
    asked = pair.load("valid")
    return unseal(base64.b64decode(asked.kv_transfer_params["reservation"]), None)  # type: ignore[index]


# -- what is no reservation, and no ticket

NONSENSE: dict[str, Any] = {
    "text": "do_remote_decode",
    "number": 7,
    "list": ["do_remote_decode", "do_remote_prefill"],
    "huge list": HUGE,
    "true": True,
    "empty": {},
    "nothing else": {"do_remote_decode": True, "do_remote_prefill": True},
    "not true": {"do_remote_decode": "true", "do_remote_prefill": 1, "reservation": "x", "ticket": "x"},
    "keys of another connector": {
        "do_remote_decode": True,
        "do_remote_prefill": True,
        "remote_engine_id": "another-engine",
        "remote_block_ids": [[0, 1, 2, 3]],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_cached_tokens": None,
        "tp_size": -1,
    },
}
RESERVATIONS: dict[str, Any] = {
    "none": None,
    "number": 7,
    "list": HUGE,
    "object": {"transfer": "x"},
    "empty": "",
    "not base64": "§§§",
    "no envelope": base64.b64encode(b"reservation").decode(),
    "empty envelope": base64.b64encode(b"PDR\x00").decode(),
    "unfinished": base64.b64encode(b"PDR\x00\x8d\xa7version\x01").decode(),
    "nested": base64.b64encode(b"PDR\x00" + b"\x91" * 100_000).decode(),
    "too long": "A" * (9 << 20),
}
TICKETS: dict[str, Any] = {
    "no metaserver": {"ticket": "t"},
    "another metaserver": {"metaserver": "http://169.254.169.254", "ticket": "t"},
    "a metaserver by another name": {"metaserver": "http://localhost:1", "ticket": "t"},
    "a number": {"metaserver": 7, "ticket": "t"},
    "a list": {"metaserver": HUGE, "ticket": "t"},
}
BAD_TICKETS: dict[str, Any] = {"none": None, "number": 7, "empty": "", "long": "t" * 257, "half a pair": "\ud800"}


def _at_prefill(pair: ConnectorPair, params: Any) -> dict[str, Any] | None:
    """Run a request with these parameters on P from start to end; return its answer's report of the push."""
    name = f"forged-{next(_names)}"
    asked = request(name, params)
    assert pair.prefill.get_num_new_matched_tokens(asked, 0) == (0, False)
    pair.prefill.update_state_after_alloc(asked, Blocks([2, 4]), 0)
    meta = pair.prefill.build_connector_meta(output(name, len(TOKENS), [2, 4]))
    assert not meta.prefill.starts and not meta.prefill.slices  # type: ignore[attr-defined]
    blocks_held, answer = pair.prefill.request_finished(asked, [2, 4])
    assert not blocks_held, "its blocks are free at once"
    return answer


def _forged_posts(pair: ConnectorPair) -> int:
    """D's posts to its metaserver for requests that are not ours."""
    return sum(not body["ticket"].startswith(("valid", "served-")) for body in pair.metaserver.bodies)


def _still_serves(pair: ConnectorPair) -> None:
    """Check that a valid request still transfers, and writes nothing but its blocks."""
    mine, theirs = pair.caches
    for cache in theirs.values():
        cache.zero_()
    asked = pair.load(f"served-{next(_names)}")
    pair.prefilled(asked)
    until(pair.results, "the valid load")
    for name in mine:
        assert torch.equal(theirs[name][[3, 5]], mine[name][[1, 6]])
        assert not theirs[name][[0, 1, 2, 4, 6, 7]].any()


@pytest.mark.parametrize("params", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_a_plain_prefill_on_either_engine(pair: ConnectorPair, params: Any) -> None:
    answer = _at_prefill(pair, params)
    meant = isinstance(params, dict) and params.get("do_remote_decode") is True
    assert (answer is not None) == meant, "a refused push is reported to the request that asked for one"
    assert pair.decode.get_num_new_matched_tokens(request("forged", params), 0) == (0, False)
    pair.decode.request_finished(request("forged", params), [0])
    assert _forged_posts(pair) == 0
    _still_serves(pair)


@pytest.mark.parametrize("reservation", RESERVATIONS.values(), ids=RESERVATIONS)
def test_what_is_no_reservation_is_refused_in_words(pair: ConnectorPair, reservation: Any) -> None:
    answer = _at_prefill(pair, {"do_remote_decode": True, "reservation": reservation})
    assert answer is not None and answer["pd_push"]["code"] in ("PD-META-005", "PD-CTRL-002")
    msgspec.json.encode(answer)
    _still_serves(pair)


@pytest.mark.parametrize("params", [*TICKETS.values()], ids=TICKETS)
def test_a_metaserver_of_the_clients_choice_is_not_called(pair: ConnectorPair, params: dict[str, Any]) -> None:
    forged = request("forged", {"do_remote_prefill": True, **params})
    for _ in range(3):
        assert pair.decode.get_num_new_matched_tokens(forged, 0) == (0, False)
    assert _forged_posts(pair) == 0
    _still_serves(pair)


@pytest.mark.parametrize("ticket", BAD_TICKETS.values(), ids=BAD_TICKETS)
def test_what_is_no_ticket_is_a_local_prefill(pair: ConnectorPair, ticket: Any) -> None:
    params = {"do_remote_prefill": True, "metaserver": pair.metaserver.url, "ticket": ticket}
    assert pair.decode.get_num_new_matched_tokens(request("forged", params), 0) == (0, False)
    assert _forged_posts(pair) == 0


# -- well-formed reservations that no D has made (engines without a secret)


def _params(reservation: Reservation) -> dict[str, Any]:
    return {"do_remote_decode": True, "reservation": base64.b64encode(seal(reservation, None)).decode()}


FORGERIES: dict[str, dict[str, Any]] = {
    "another protocol": {"version": PROTOCOL_VERSION + 1},
    "another model": {"model": "gpt"},
    "another prompt": {"prompt_hash": "0" * 64},
    "a longer prompt": {"prompt_length": 41, "end": 41},
    "beyond the prompt": {"end": 1 << 40},
    "a reversed range": {"first": 32, "end": 16},
    "an empty range": {"first": 40, "end": 40},
    "no blocks": {"blocks": (b"",)},
    "too few blocks": {"blocks": (np.array([1], dtype="<i4").tobytes(),)},
    "too many blocks": {"blocks": (np.zeros(500_000, dtype="<i4").tobytes(),)},
    "half a block": {"blocks": (b"\x01\x00\x00",)},
    "no endpoints": {"endpoints": ()},
    "another dtype": {"layout": {"dtype": "fp8"}},
    "layers of another model": {"layout": {"stages": (("a", "b"),)}},
}
# Forgeries of the layout in a reservation.
CACHES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a huge TP": lambda layout: layout["geometry"].update(tp_size=1 << 40),
    "no workers": lambda layout: layout["endpoints"].clear(),
    "a crowd": lambda layout: layout["endpoints"].extend([["127.0.0.1", 9]] * 5000),
    "workers without number": lambda layout: layout["geometry"].update(tp_size=1024, pcp=1024),
    "blocks of nothing": lambda layout: layout["geometry"].update(block_size=0),
    "blocks of everything": lambda layout: layout["geometry"].update(block_size=1 << 62),
    "negative blocks": lambda layout: layout["geometry"].update(block_size=-32),
    "groups of nothing": lambda layout: layout["geometry"].update(groups=[[0]]),
    "no heads": lambda layout: layout["geometry"].update(kv_heads=0),
    "a billion heads": lambda layout: layout["geometry"].update(kv_heads=1 << 30),
    "no components": lambda layout: layout["geometry"]["regions"].clear(),
    "no stages": lambda layout: layout["geometry"]["stages"].clear(),
    "no layers": lambda layout: layout["geometry"]["stages"][0].clear(),
    "a hundred thousand layers": lambda layout: layout["geometry"]["stages"][0].extend(
        f"layer.{i}" for i in range(100_000)
    ),
    "a layer of no kind": lambda layout: layout["geometry"].update(kind_of=[7] * len(layout["geometry"]["stages"][0])),
}


@pytest.mark.parametrize("changes", FORGERIES.values(), ids=FORGERIES)
def test_a_made_up_reservation_is_refused_before_any_worker_hears_of_it(
    pair: ConnectorPair, valid: Reservation, changes: dict[str, Any]
) -> None:
    changed = {key: value for key, value in changes.items() if key != "layout"}
    geometry = msgspec.structs.replace(valid.geometry, **changes.get("layout", {}))
    answer = _at_prefill(pair, _params(msgspec.structs.replace(valid, geometry=geometry, **changed)))
    assert answer is not None and answer["pd_push"]["code"].startswith("PD-"), answer


def _refused_layout(pair: ConnectorPair, valid: Reservation, forge: Callable[[dict[str, Any]], object]) -> None:
    form = as_sent(valid)
    layout = msgspec.msgpack.decode(form.layout)
    forge(layout)
    forged = msgspec.structs.replace(form, layout=msgspec.msgpack.encode(layout))
    sealed = b"PDR\x00" + msgspec.msgpack.encode(forged)
    answer = _at_prefill(pair, {"do_remote_decode": True, "reservation": base64.b64encode(sealed).decode()})
    assert answer is not None and answer["pd_push"]["code"].startswith("PD-"), answer


@pytest.mark.parametrize("forge", CACHES.values(), ids=CACHES)
def test_a_made_up_cache_is_refused_before_any_arithmetic(
    pair: ConnectorPair, valid: Reservation, forge: Callable[[dict[str, Any]], object]
) -> None:
    _refused_layout(pair, valid, forge)


@pytest.mark.parametrize("field", range(1, 5), ids=("block_stride", "head_stride", "token_stride", "cell_bytes"))
@pytest.mark.parametrize("value", [-1, 1 << 62, 1 << 40])
def test_a_made_up_layout_is_refused_too(pair: ConnectorPair, valid: Reservation, field: int, value: int) -> None:
    _refused_layout(pair, valid, lambda layout: layout["geometry"]["regions"][0].__setitem__(field, value))


@pytest.mark.parametrize("blocks", [[0, 1], [6, 7], [100, 200], [-1, -2], [2**31 - 1, 2**31 - 1]], ids=str)
def test_blocks_that_were_not_reserved_are_never_written(
    pair: ConnectorPair, valid: Reservation, blocks: list[int]
) -> None:
    """The transfer does not exist: D grants no authority for what its scheduler has not bound."""
    name = f"forged-{next(_names)}"
    transfer = msgspec.structs.replace(valid.transfer, uuid=name)
    ids = np.array(blocks, dtype="<i4").tobytes()
    before = {each: cache.clone() for each, cache in pair.caches[1].items()}
    asked = request(name, _params(msgspec.structs.replace(valid, transfer=transfer, blocks=(ids,), deadline_s=1.0)))
    pair.prefill.update_state_after_alloc(asked, Blocks([2, 4]), 0)
    pair.prefill_step(output(name, len(TOKENS), [2, 4]))
    blocks_held, _ = pair.prefill.request_finished(asked, [2, 4])
    assert blocks_held
    sent: list[str] = []
    until(lambda: sent.extend(pair.prefill_step(output(), finished=frozenset({name})).finished_sending) or sent)
    pair.prefill.update_connector_output(KVConnectorOutput(finished_sending=set(sent)))
    assert sent == [name], "its blocks on P are free again"
    for each, cache in pair.caches[1].items():
        assert torch.equal(cache, before[each])


def test_a_reservation_is_good_for_one_push(pair: ConnectorPair) -> None:
    asked = pair.load(f"served-{next(_names)}")
    pair.prefilled(asked)
    until(pair.results, "the load")
    report = _at_prefill(pair, asked.kv_transfer_params)
    assert report is not None and "pushed already" in report["pd_push"]["detail"]


# -- with a secret


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[AscendPushConnector]:
    path = tmp_path / "secret"
    path.write_bytes(SECRET.current)
    path.chmod(0o600)
    made = {
        kind: connector("kv_producer", kind, {"secret_file": str(path)})
        for kind in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
    }
    made[KVConnectorRole.WORKER].register_kv_caches(tensors())
    shake = made[KVConnectorRole.WORKER].get_handshake_metadata()
    assert shake is not None
    made[KVConnectorRole.SCHEDULER].set_xfer_handshake_metadata({0: shake})
    yield made[KVConnectorRole.SCHEDULER]
    for each in made.values():
        each.shutdown()


def _answer(prefill: AscendPushConnector, sealed: bytes, name: str) -> dict[str, Any] | None:
    asked = request(name, {"do_remote_decode": True, "reservation": base64.b64encode(sealed).decode()})
    prefill.update_state_after_alloc(asked, Blocks([2, 4]), 0)
    prefill.build_connector_meta(output(name, len(TOKENS), [2, 4]))
    return prefill.request_finished(asked, [])[1]


def test_only_a_reservation_under_our_secret_is_taken(valid: Reservation, guarded: AscendPushConnector) -> None:
    mine = seal(valid, SECRET)
    flipped = bytearray(mine)
    flipped[-1] ^= 1
    forged = {
        "unsigned": seal(valid, None),
        "of another secret": seal(valid, Secrets(b"x" * 32)),
        "changed": bytes(flipped),
        "signed, its contents unsigned": mine[:4] + bytes(32) + mine[36:],
    }
    for name, sealed in forged.items():
        answer = _answer(guarded, sealed, name)
        assert answer is not None and answer["pd_push"]["code"] == "PD-SEC-003", name
        assert "kkkk" not in str(answer)
    answer = _answer(guarded, mine, "valid")
    assert answer is not None and "code" not in answer["pd_push"]
