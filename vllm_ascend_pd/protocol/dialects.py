# SPDX-License-Identifier: Apache-2.0
"""Fields of `kv_transfer_params` from routers other than our metaserver, and request names that both engines share.

A client can reach an engine without a router, so a value may be anything that JSON can express. Addresses that D calls
must be in the allow-list, or in P's answer under P's seal. docs/routers.md lists what each router sends.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.protocol.auth import Secrets, unseal_source
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.meeting import Source, SourceId

MAX_NAME = 256
ROUTE = "/v1/metaserver"
ROOM = 8  # characters of a name that stay free for the place of the prompt after it
MAX_SOURCE = 8192  # characters
_RANDOM = 9  # vLLM appends a dash and eight random characters to every request id
_QUERY = re.compile(r"(?:[A-Za-z_]{1,32}=[A-Za-z0-9_.-]{0,64}(?:&(?!$)|$)){0,4}")
_COMPLETION, _CHAT = "cmpl-", "chatcmpl-"


@dataclass(frozen=True, slots=True)
class Meet:
    """Listener to which D offers its reservation, for a source of P's answer or for the request of a name."""

    p_waits: ClassVar[bool] = True
    carries_first: ClassVar[bool] = True

    listener: Endpoint
    source: SourceId | None = None
    name: str = ""

    @property
    def metaserver(self) -> str:
        return ""  # there is none to report to

    @property
    def ticket(self) -> str:
        return str(self.source) if self.source is not None else self.name


@dataclass(frozen=True, slots=True)
class PassingRouter:
    """Router to which D posts its reservation, and which puts that JSON unchanged into P's request.

    It answers once P has answered. It finds its request by the `ticket`: its X-Request-Id as vLLM's front end wrote it.
    """

    p_waits: ClassVar[bool] = False
    carries_first: ClassVar[bool] = False

    router: str  # scheme://host:port
    ticket: str
    query: str = ""  # part of its address after the question mark

    @property
    def metaserver(self) -> str:
        return ""  # there is none to report to

    def body(self, reservation: str) -> dict[str, Any]:
        """Return P's `kv_transfer_params`, with what the router itself reads."""
        role = {"do_remote_decode": True, "do_remote_prefill": False}
        return {"request_id": self.ticket, **role, "reservation": reservation}


def name_of(request_id: str) -> str:
    """Return the name by which the other engine knows a request; empty if the id is not of the expected form.

    It is the router's X-Request-Id, for completions with the place of the prompt.
    """
    outer = _as_sent(request_id)
    for prefix in (_CHAT, _COMPLETION):
        if outer.startswith(prefix) and len(outer) - len(prefix) <= MAX_NAME:
            return outer.removeprefix(prefix)
    return ""


def _as_sent(request_id: str) -> str:
    """Return the id as vLLM's front end made it of the router's, without the random characters."""
    return request_id[:-_RANDOM] if request_id[-_RANDOM : -_RANDOM + 1] == "-" else request_id


def meets_under(params: Mapping[str, Any], request_id: str) -> str:
    """Return the name by which an offer of D can name this request of P.

    Mooncake's dialect has a name of its own in both requests, which takes precedence over the router's.
    """
    value = params.get("transfer_id")
    return _placed(value, request_id) if _is_name(value) else name_of(request_id)


def read_passing_router(
    params: Mapping[str, Any], request_id: str, allowed: Collection[str]
) -> PassingRouter | PdError | None:
    """Return the router that passes on what D posts, as a request of D names it, or the error that refuses it.

    Return None if the request names none, or our metaserver, which gives a ticket.
    """
    url = params.get("metaserver")
    if not isinstance(url, str) or params.get("ticket") is not None:
        return None
    address, _, query = url.partition("?")
    if not address.endswith(ROUTE):
        return None
    router = address.removesuffix(ROUTE)
    if router not in allowed:
        return PdError("PD-META-001", url=url[:MAX_NAME])
    if not _QUERY.fullmatch(query):
        return PdError("PD-META-029", why="the query of its metaserver is none of a router's")
    if not name_of(request_id):
        return PdError("PD-META-029", why="its router would not know the request's id again")
    return PassingRouter(router, _as_sent(request_id), query)


def read_meet(
    params: Mapping[str, Any],
    request_id: str,
    prompt: tuple[int, str],
    listeners: Collection[str],
    secrets: Secrets | None,
) -> Meet | PdError | None:
    """Return the P that a request of D names, or the error that refuses it.

    Return None if the request names neither a source nor an engine.
    """
    if params.get("source") is not None:
        return _read_source(params["source"], prompt, listeners, secrets)
    if params.get("remote_bootstrap_addr") is not None:
        listener = _endpoint_of(params.get("remote_engine_id"))
        if listener is None:
            return PdError(
                "PD-META-029", why="remote_engine_id is no address: P has no bootstrap_port, or another connector"
            )
        return _named(listener, params.get("transfer_id"), "transfer_id", request_id, listeners)
    host, port = params.get("remote_host"), params.get("remote_port")
    if host is None and port is None:
        return None
    if params.get("remote_block_ids"):
        return PdError("PD-META-029", why="remote_block_ids are of another connector")
    if not isinstance(host, str) or not 0 < len(host) <= MAX_NAME or not isinstance(port, int) or not _is_port(port):
        return PdError("PD-META-029", why="remote_host and remote_port are no address")
    name = params.get("remote_request_id")
    return _named(Endpoint(host, port), name, "remote_request_id", request_id, listeners)


def _named(listener: Endpoint, name: object, key: str, request_id: str, listeners: Collection[str]) -> Meet | PdError:
    if not _is_name(name):
        return PdError("PD-META-029", why=f"there is no {key}")
    if not _is_allowed(listener, listeners):
        return PdError("PD-META-030", address=listener)
    return Meet(listener, name=_placed(name, request_id))


def _read_source(
    value: object, prompt: tuple[int, str], listeners: Collection[str], secrets: Secrets | None
) -> Meet | PdError:
    if not isinstance(value, str) or len(value) > MAX_SOURCE:
        return PdError("PD-META-029", why="its source is not a string, or is too long")
    try:
        source: Source = unseal_source(base64.b64decode(value, validate=True), secrets)
    except ValueError:
        return PdError("PD-META-029", why="its source is not base64")
    except PdError as refused:
        return refused
    if secrets is None and not _is_allowed(source.listens, listeners):  # unsigned: any client could have written it
        return PdError("PD-META-030", address=source.listens)
    if (source.prompt_length, source.prompt_hash) != prompt:
        return PdError("PD-META-005", why="the prompts differ (tokens, LoRA, multimodal input or cache salt)")
    return Meet(source.listens, source=source.source)


def _is_port(port: int) -> bool:
    return not isinstance(port, bool) and 0 < port < 65536


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME - ROOM and value.isascii()


def _endpoint_of(value: object) -> Endpoint | None:
    """Return the address in an id that P gave to a router (prefill/scheduler/bootstrap.py); None if there is none."""
    if not isinstance(value, str) or len(value) > MAX_NAME or not value.isascii():
        return None
    host, _, port = value.rpartition(":")
    return Endpoint(host, int(port)) if host and port.isdecimal() and _is_port(int(port)) else None


def _is_allowed(listener: Endpoint, listeners: Collection[str]) -> bool:
    return listener.host in listeners or str(listener) in listeners


def _placed(name: str, request_id: str) -> str:
    """Return the name, for completions with the place of the prompt in its request, as P's own id has it."""
    place = name_of(request_id).rpartition("-")[2] if request_id.startswith(_COMPLETION) else ""
    return f"{name}-{place}" if place.isdecimal() else name
