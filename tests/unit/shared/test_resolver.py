# SPDX-License-Identifier: Apache-2.0
"""Look-ups of names, with a name server in the test's hands: a slow one delays nothing but its own names."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from unit.kits.names import WAIT_S, NameServer
from vllm_ascend_pd.shared import resolver as module
from vllm_ascend_pd.shared.resolver import Resolver


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = NameServer(monkeypatch)
    yield made
    made.gate.set()


def hosts(addresses: list[module.Address]) -> list[str]:
    return [address["host"] for address in addresses]


async def until_asked(server: NameServer, *names: str) -> None:
    while not all(server.asked[name] for name in names):
        await asyncio.sleep(0.001)


async def test_slow_names_delay_no_other_however_many_they_are(server: NameServer) -> None:
    resolver, server.slow = Resolver(), {f"slow-{i}.test" for i in range(40)}  # more than the loop's own threads
    waiting = [asyncio.create_task(resolver.resolve(name)) for name in server.slow]
    await until_asked(server, *server.slow)
    assert hosts(await asyncio.wait_for(resolver.resolve("quick.test"), WAIT_S)) == ["127.0.0.1"]
    assert not any(task.done() for task in waiting)
    server.gate.set()
    assert [hosts(addresses) for addresses in await asyncio.gather(*waiting)] == [["127.0.0.1"]] * 40


async def test_a_name_is_looked_up_once_for_all_who_ask_and_who_leaves_stops_nothing(server: NameServer) -> None:
    resolver, server.slow = Resolver(), {"slow.test"}
    asking = [asyncio.create_task(resolver.resolve("slow.test", 80 + i)) for i in range(20)]
    await until_asked(server, "slow.test")
    asking[0].cancel()
    await asyncio.wait({asking[0]})
    server.gate.set()
    answers = await asyncio.gather(*asking[1:])
    assert [[(address["host"], address["port"]) for address in one] for one in answers] == [
        [("127.0.0.1", 80 + i)] for i in range(1, 20)
    ]
    assert hosts(await resolver.resolve("slow.test")) == ["127.0.0.1"] and server.asked["slow.test"] == 1


async def test_the_last_good_answer_serves_while_the_next_is_awaited_or_fails(
    server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = Resolver()
    await resolver.resolve("engine.test")
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    server.addresses, server.slow = ["127.0.0.2"], {"engine.test"}
    assert hosts(await resolver.resolve("engine.test")) == ["127.0.0.1"], "the look-up hangs"
    server.gate.set()
    while hosts(await resolver.resolve("engine.test")) != ["127.0.0.2"]:
        await asyncio.sleep(0.001)
    server.wrong["engine.test"] = socket.EAI_NONAME
    before = server.asked["engine.test"]
    while server.asked["engine.test"] < before + 5:
        assert hosts(await resolver.resolve("engine.test")) == ["127.0.0.2"], "the look-up fails"
        await asyncio.sleep(0.001)
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    with pytest.raises(OSError, match="as set"):
        await resolver.resolve("engine.test")


@pytest.mark.parametrize(
    ("literal", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("fe80::1%lo", socket.AF_INET6)]
)
async def test_an_address_is_its_own_answer(literal: str, family: int, server: NameServer) -> None:
    (address,) = await Resolver().resolve(literal, 80)
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    assert address == {"hostname": literal, "host": literal, "port": 80, "family": family, "proto": 0, "flags": flags}
    assert Resolver().known(literal)


async def test_no_more_names_are_kept_than_may_be(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 3)
    resolver = Resolver()
    for i in range(5):
        await resolver.resolve(f"{i}.test")
    assert [resolver.known(f"{i}.test") is not None for i in range(5)] == [False, False, True, True, True]


async def test_the_end_waits_for_no_look_up(server: NameServer) -> None:
    resolver, server.slow = Resolver(), {"slow.test"}
    asking = asyncio.create_task(resolver.resolve("slow.test"))
    await until_asked(server, "slow.test")
    await resolver.close()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_what_is_known_of_a_name_serves_if_a_new_look_up_fails_or_hangs(server: NameServer) -> None:
    resolver = Resolver()
    with pytest.raises(OSError, match="as set"):
        server.wrong["engine.test"] = socket.EAI_NONAME
        await resolver.newest("engine.test", WAIT_S)
    server.wrong.clear()
    assert await resolver.newest("engine.test", WAIT_S) == [(socket.AF_INET, "127.0.0.1")]
    server.addresses = ["127.0.0.2"]
    assert await resolver.newest("engine.test", WAIT_S) == [(socket.AF_INET, "127.0.0.2")], "at once, however fresh"
    server.addresses, server.wrong["engine.test"] = ["127.0.0.3"], socket.EAI_AGAIN
    assert await resolver.newest("engine.test", WAIT_S) == [(socket.AF_INET, "127.0.0.2")]
    server.wrong.clear()
    server.slow = {"engine.test"}
    assert await resolver.newest("engine.test", 0.01) == [(socket.AF_INET, "127.0.0.2")]
