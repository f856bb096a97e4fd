# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet: a stable code, what happened, what to do about it.

The catalogue is the single source: `PdError("PD-CONF-001", key=...)` fills the sentence and the remedy
with the values at hand. Codes never change their meaning; a retired code is never used again.
docs/errors.md is printed by `python -m vllm_ascend_pd.errors`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalogue. `{name}` in either text is filled from the error's values."""

    sentence: str
    remedy: str


CATALOGUE: dict[str, Entry] = {
    # -- configuration: found while an engine starts
    "PD-CONF-001": Entry(
        "Unknown key {key!r} in kv_connector_extra_config.",
        "Did you mean {nearest!r}? docs/configuration.md lists every key.",
    ),
    "PD-CONF-002": Entry(
        "{key} = {value!r} has the wrong type: {expected} is wanted.",
        "Give {key} as {expected}; its default is {default!r}.",
    ),
    "PD-CONF-003": Entry("{key} = {value!r} is impossible: {why}.", "{remedy}"),
    "PD-CONF-004": Entry(
        "kv_role = {role!r} cannot be used with this connector.",
        'Start the prefill engine with kv_role "kv_producer" and the decode engine with "kv_consumer": an engine has one role. Other connectors of its MultiConnector may keep "kv_both" (docs/routers.md).',
    ),
    "PD-CONF-005": Entry(
        "{feature} is not supported by this connector yet, so the engine does not start with it.",
        "{remedy}",
    ),
    "PD-CONF-006": Entry(
        "{key} = {configured!r} in the configuration, but this engine runs with {actual!r}.",
        "Remove {key} (sizes are learned from the peer) or make it equal to the engine's own size.",
    ),
    "PD-CONF-007": Entry("The instances file {path!r} cannot be used: {why}.", "See docs/operations.md for its form; the instances known before stay."),
    "PD-CONF-008": Entry("The metaserver cannot listen on {address}: {why}.", "Free the port or choose another one."),
    # -- geometry: the two engines' caches do not fit each other
    "PD-GEO-001": Entry(
        "{field} differs between prefill ({prefill!r}) and decode ({decode!r}).",
        "Start both engines with the same model, cache dtype and attention backend. With context parallelism one side's block size "
        "must divide the other's, and so must its --cp-kv-cache-interleave-size.",
    ),
    "PD-GEO-002": Entry(
        "Block sizes differ ({prefill} and {decode}), and this layout or a sliding window does not allow it.",
        "Give both engines the same --block-size.",
    ),
    "PD-GEO-003": Entry(
        "The KV cache layout of layer {layer!r} is not understood: {why}.",
        "Report the attention backend and the shapes; use a kind of cache that docs/kinds.md lists meanwhile.",
    ),
    "PD-GEO-004": Entry(
        "Layer {layer} was not computed in a step whose tokens are to be pushed.",
        "A draft model does not run for prompts that end within its draft tokens of max_model_len: raise it on prefill. "
        "Else the model runner did not call the layer's hook: report it with the model and the versions.",
    ),
    # -- wire
    "PD-WIRE-001": Entry(
        "The transfer engine cannot be used: {why}.",
        "If it is missing or too old: pip install mooncake-transfer-engine-non-cuda (CPU) or -npu (Ascend); on Debian also "
        "libibverbs1 libnuma1 libcurl4. Else check the host's address, mooncake_protocol and the devices.",
    ),
    "PD-WIRE-002": Entry(
        "Memory registration failed with {rc} for {length} bytes at {address:#x}.",
        "Check that no other component registered an overlapping region and that the region count is within the engine's limit.",
    ),
    "PD-WIRE-003": Entry(
        "A write of {length} bytes at {address:#x} lies outside the registered memory ({side}).",
        "This is a bug: report it with both engines' start-up logs.",
    ),
    "PD-WIRE-004": Entry(
        "Checksums of layer {layer!r} differ for transfer {transfer}.",
        "The KV that arrived is not what was sent: check the fabric; the request was failed, not answered.",
    ),
    "PD-WIRE-005": Entry(
        "The peer's addresses do not fit its cache layout: {why}.",
        "Run the same release of this package on both sides; if it is the same, report it with both engines' start-up logs.",
    ),
    "PD-WIRE-006": Entry(
        "The caches of this process are {count} separate regions of memory, and over Ascend's links a process can register {max}.",
        "Use more pipeline stages, so that a process has fewer layers, or an engine that allocates the caches of several layers as one.",
    ),
    # -- control channel
    "PD-CTRL-001": Entry("The side channel cannot listen on {address}: {why}.", "Free the port or change side_channel_port."),
    "PD-CTRL-002": Entry("A peer sent a message that is not valid: {why}.", "Check that both engines run the same version."),
    "PD-CTRL-003": Entry("Protocol version {theirs} of the peer is not {ours}.", "Install the same version on both engines."),
    "PD-CTRL-004": Entry("A message needs {word!r}, which this release does not know.", "Upgrade this engine first."),
    # -- security
    "PD-SEC-001": Entry("The secret file {path!r} cannot be used: {why}.", "Create it with mode 0600 and at least 32 bytes."),
    "PD-SEC-002": Entry(
        "{address} is not a loopback address and no secret_file is configured.",
        "Set secret_file, or allow_unauthenticated: true on a network that you trust entirely.",
    ),
    "PD-SEC-003": Entry("A message failed authentication: {why}.", "Check that both engines use the same secret_file."),
    "PD-SEC-004": Entry("The token file {path!r} cannot be used: {why}.", "Write one word of at least 16 characters into it (clients' keys: one a line), mode 0600."),
    "PD-SEC-005": Entry("This needs the admin token.", "Send the header Authorization: Bearer with the word in the file of --admin-token-file."),
    "PD-SEC-006": Entry(
        "Without an admin token this is for callers on the metaserver's own host only.",
        "Start the metaserver with --admin-token-file, or let it listen on loopback and call it there under a loopback name.",
    ),
    "PD-SEC-007": Entry(
        "This needs the key of a client.",
        "Send the header Authorization: Bearer with one of the words in the file of --client-token-file.",
    ),
    # -- metaserver and reservations
    "PD-META-001": Entry("Metaserver {url!r} is not in metaserver_urls.", "Add its exact scheme, host and port to metaserver_urls."),
    "PD-META-002": Entry("The metaserver could not be reached: {why}.", "Check that it runs and that the address is right."),
    "PD-META-003": Entry("The metaserver answered {status}: {why}.", "See the metaserver's log for the request id."),
    "PD-META-004": Entry("Too many reservations are waiting for the metaserver ({count}).", "Raise metaserver_max_queue or add capacity."),
    "PD-META-005": Entry("The reservation does not fit the prompt: {why}.", "Send the same prompt to both engines; check the tokenizers. If the router asks prefill first, set hold_sources there (docs/routers.md)."),
    "PD-META-006": Entry("Prefill failed: {why}.", "See the prefill engine's log."),
    "PD-META-007": Entry("The decode instance could not answer: {why}.", "See the decode engine's log; the metaserver tries another instance when there is one."),
    "PD-META-008": Entry("No {role} instance can take the request.", "The status page and /instances say why; start, add or undrain one."),
    "PD-META-009": Entry("Too many requests are waiting.", "Come back after Retry-After; add instances, or raise --max-running and --max-waiting."),
    "PD-META-010": Entry("The metaserver is shutting down.", "Send the request again; another metaserver or the next one takes it."),
    "PD-META-011": Entry("The {role} instance {name} takes no requests: {why}.", "Look at that engine's log; it is probed, and taken back by itself."),
    "PD-META-012": Entry("The request body cannot be used: {why}.", "Send what the API describes, as JSON."),
    "PD-META-013": Entry("The request body is larger than {max} bytes.", "Send less at once; for clients --max-body-mib is the limit."),
    "PD-META-014": Entry("The request body comes too slowly: {size} bytes in {seconds} s.", "Look at the network between the client and the metaserver."),
    "PD-META-015": Entry("Too many large requests are coming in at once.", "Come back after Retry-After; send less at once, or raise --workers."),
    "PD-META-016": Entry("There is no route {path}.", "docs/metaserver.md names the routes; those of the OpenAI API begin with /v1/."),
    "PD-META-017": Entry("The route {path} does not take {method}.", "The answer's Allow header says what it takes."),
    "PD-META-018": Entry("There is no instance {name}.", "GET /instances lists them; a name is host:port as it stands there."),
    "PD-META-019": Entry("{name} is a {role} instance already.", "An instance has one role: take the name out where it was given first."),
    "PD-META-020": Entry("The body is not sent as application/json.", "Send the header Content-Type: application/json."),
    "PD-META-021": Entry("The metaserver's supervisor did not answer.", "Try again; the metaserver's log says whether the workers are well."),
    "PD-META-022": Entry(
        "The decode instance ended the request halfway, for lack of KV blocks.",
        "Send it again. If it happens often, give decode more memory for its cache or fewer requests at a time.",
    ),
    "PD-META-023": Entry(
        "The request comes from a metaserver: one of its instances is a metaserver and no engine.",
        "Give --prefill and --decode the engines' own addresses.",
    ),
    "PD-META-024": Entry(
        "{problem} No other instance can go on with exactly this stream: {why}.",
        "Send it again. docs/metaserver.md says which answers go on when their decode instance fails.",
    ),
    "PD-META-025": Entry(
        "The decode instance broke off, and no other could go on with the stream: {why}.",
        "Send it again; the metaserver's status page (its /) shows which decode instances take requests.",
    ),
    "PD-META-026": Entry(
        "No request of the name {name!r} came to prefill within {seconds} s.",
        "Check that the router sends both engines the same X-Request-Id; raise meet_s where prefill's queue is longer.",
    ),
    "PD-META-027": Entry(
        "Prefill does not have this source: {why}.",
        "Nothing to do for one request. If it happens often, raise hold_s: decode comes for it too late.",
    ),
    "PD-META-028": Entry(
        "Prefill does not hold what it has computed: {count} wait already.",
        "Raise hold_sources or hold_share, or add decode capacity: blocks wait for decode engines that do not come.",
    ),
    "PD-META-029": Entry(
        "The kv_transfer_params cannot be used: {why}.",
        "docs/routers.md has what each router sends; nothing of it is for clients to set.",
    ),
    "PD-META-030": Entry(
        "Prefill engine {address} is not in prefill_listeners.",
        "Add its host, or host:port, to prefill_listeners of decode.",
    ),
    "PD-META-031": Entry(
        "Prefill did not keep the KV of this request, which came without a reservation: {why}.",
        "docs/routers.md says which routers need hold_sources, and which caches can be held.",
    ),
    "PD-META-032": Entry(
        "The prefill engine {address}, which a request's header names, is not allowed.",
        "Give the sidecar its host, host:port or network in --prefill-allowed.",
    ),
    "PD-META-033": Entry(
        "Decode needs prefill's first token for this prompt, and prefill does not choose or report it as decode asks: {why}.",
        "Nothing to do for one request. If it happens often, give all prefill engines the same first_token, log-probability mode and release.",
    ),
    "PD-META-034": Entry(
        "The decode instance that has this response is not an instance any more.",
        "Send the conversation again as input: responses are stored in the memory of one decode instance.",
    ),
    "PD-META-040": Entry("The request is no HTTP that is understood: {why}.", "Look at the client, and at proxies before the metaserver."),
    "PD-META-041": Entry("The metaserver failed at this request.", "See the metaserver's log, and report what it says."),
    # -- ops: the compiled extension and what it is given
    "PD-OPS-001": Entry("The compiled extension {library} cannot be loaded: {why}.", "Build it: pip install . (see docs/building.md)."),
    "PD-OPS-002": Entry(
        "The op {name} has no kernel of its own for device {device!r}.",
        "Build with VLLM_ASCEND_PD_NPU=1 where CANN and torch_npu are installed; without it torch would fall back to the CPU silently.",
    ),
    "PD-OPS-003": Entry(
        "Region {region!r} (strides {strides}, cell {cell} bytes) is not a whole number of the cache's {item}-byte elements.",
        "This is a bug: report it with the attention backend and the cache dtype.",
    ),
    "PD-OPS-004": Entry("A table of work was made for {expected}, but is used with {actual}.", "This is a bug: report it with the engine's log."),
    # -- transfers
    "PD-XFER-001": Entry("The transfer missed its deadline ({why}).", "See the timeline of the request; raise the timer named there if the work is merely slow."),
    "PD-XFER-002": Entry("The transfer was cancelled ({why}).", "Nothing to do."),
    "PD-XFER-003": Entry("A write to {peer} failed.", "Check the peer and the network; its blocks are quarantined until they are quiet."),
    "PD-XFER-004": Entry("The peer {peer} is gone.", "Restart it; nothing else must be restarted."),
    "PD-XFER-005": Entry("The peer refused the transfer: {why}.", "See the peer's log."),
    "PD-XFER-006": Entry(
        "The exchange between the prefill ranks failed: {why}.",
        "See the prefill engine's log; a rank that died stops the whole engine.",
    ),
    "PD-XFER-007": Entry(
        "This prefill worker cannot push any more: its writer thread died ({why}).",
        "Restart the engine; the traceback of the writer is in its log: report it.",
    ),
    "PD-XFER-008": Entry(
        "The KV came, and prefill's first token did not ({why}): in a cache with windows or states a whole prompt goes on with it alone.",
        "Nothing to do for one request. If it happens often, raise lease_s and first_token_wait_s, or set first_token to off on decode.",
    ),
    "PD-XFER-009": Entry(
        "Loaded requests hold all blocks, and none of them can go on: this one gives its blocks back, and its prompt is computed here.",
        "Nothing to do for one request. If it happens often, give decode blocks for several times max_model_len.",
    ),
    "PD-XFER-010": Entry(
        "This decode engine keeps its heads in int8 and computes no prompts: a request that loads nothing, or has lost its blocks, ends.",
        "Send requests through a router that has a prefill engine. If blocks run out often, give decode more of them.",
    ),
}  # fmt: skip


MAX_FOREIGN = 1000  # characters of a peer's or another library's text that are shown


def one_line(text: object, max_chars: int = MAX_FOREIGN) -> str:
    """Return foreign text as one bounded, printable line: a line break in it must not look like a line of our log."""
    whole = str(text)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in whole[:max_chars])
    return shown if len(whole) <= max_chars else f"{shown} … ({len(whole)} characters)"


class PdError(Exception):
    """An error from the catalogue, with its values filled in."""

    def __init__(self, code: str, **values: object) -> None:
        entry = CATALOGUE[code]
        self.code = code
        self.values = values
        foreign = (str, BaseException)
        shown = {name: one_line(value) if isinstance(value, foreign) else value for name, value in values.items()}
        self.sentence = entry.sentence.format(**shown)
        self.remedy = entry.remedy.format(**shown)
        super().__init__(f"{code}: {self.sentence} {self.remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries inside vLLM: rebuild from the code and the values.
        return (_rebuild, (type(self), self.code, self.values))


def _rebuild(kind: type[PdError], code: str, values: dict[str, object]) -> PdError:
    return kind(code, **values)


class ConfigError(PdError, ValueError):
    """Error that stops the start of an engine."""


def not_proven(feature: str, remedy: str) -> ConfigError:
    return ConfigError("PD-CONF-005", feature=feature, remedy=remedy)


class LocalProtocolError(RuntimeError):
    """This side did something that the protocol forbids: a bug here, never the peer's."""


class RemoteProtocolError(PdError):
    """The peer did something that the protocol forbids. It is counted and answered, and changes nothing."""


_FAMILIES = {
    "CONF": "Configuration: found while an engine or the metaserver starts",
    "GEO": "Geometry: the two engines' caches do not fit each other",
    "WIRE": "Wire: the transfer engine and what it is given",
    "CTRL": "Control: the side channel between P and D",
    "SEC": "Security: secrets, tokens and access",
    "META": "Metaserver: reservations and the two HTTP legs",
    "OPS": "Ops: the compiled extension",
    "XFER": "Transfers: one request's KV did not come",
}

_HEAD = """# Errors

Every error has a code that never changes its meaning. Logs, HTTP answers and the `reason` label of the metrics carry
it. Words in *italics* are filled in with the values at hand. [operations.md](operations.md) says what to do in a
running cluster. This page is printed by `python -m vllm_ascend_pd.errors`; a test keeps it equal to the code."""


def reference() -> str:
    """Return docs/errors.md, from the catalogue."""
    lines = [_HEAD]
    family = ""
    for code, entry in CATALOGUE.items():
        if code.split("-")[1] != family:
            family = code.split("-")[1]
            lines += ["", f"## {_FAMILIES[family]}", "", "| code | what happened | what to do |", "|---|---|---|"]
        remedy = "The error says it." if entry.remedy == "{remedy}" else _readable(entry.remedy)
        lines.append(f"| {code} | {_readable(entry.sentence)} | {remedy} |")
    return "\n".join(lines)


def _readable(text: str) -> str:
    return re.sub(r"\{(\w+)[^}]*\}", r"*\1*", text)


if __name__ == "__main__":
    print(reference())
