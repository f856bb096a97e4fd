# SPDX-License-Identifier: Apache-2.0
"""Facts of a release for scripts/upstream.sh: what this package's own code says of it, over skeletons of its modules.

A process of its own for each release: `python -m tools.support.release_facts [--as-new] PROJECT=VERSION=FILE …`.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tools.support import sdist, skeletons
from tools.support.skeletons import PACKAGES, Parameters, Sources, accepts, fields, members, parameters
from tools.support.uses import PACKAGE, Imported, Uses, flat

_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
CONNECTOR = "KVConnectorBase_V1"
ON_D = "P's first token (D)"
GROUPS = "several groups of a cache"
RAISES = "raises"
AS_NEW = "(as new) "  # in front of a version: no release that was tried begins so


def facts(sources: Sources, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return what this package says of these packages, and what it must be compared by."""
    sources.install()
    uses = Uses.of()
    fails = list(_imports_fail())
    result: dict[str, Any] = {
        "missing": _missing(uses),
        "functions": dict(_functions(uses)),
        "words": sorted(_words(sources, uses)),
        "members": _members(sources, uses),
        "fails": fails,
    }
    asked: dict[str, Callable[[], Any]] = {
        "kinds": lambda: sorted(_kinds(sources)),
        "changes": lambda: _changes(sources, versions),
    }
    asked |= {"fields": lambda: _fields(sources), "contracts": lambda: [*_contracts(), *_wrappers()]}
    for what, ask in asked.items():
        try:
            result[what] = ask()
        except Exception as problem:  # noqa: BLE001 (whatever this package's own code raises over another release)
            result[what] = {} if what in ("changes", "fields") else []
            fails.append(f"{what} cannot be read: {type(problem).__name__}: {problem}")
    fails += result.pop("contracts")
    fails += [f"{change} {shape}" for change, (_, shape) in result["changes"].items() if shape.startswith(RAISES)]
    return result


def _imports_fail() -> Iterator[str]:
    """Return the modules of this package that cannot be imported over the release, and why."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search(r"^\s*(from|import) vllm\b", path.read_text(), re.MULTILINE):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            try:
                importlib.import_module(name)
            except Exception as problem:  # noqa: BLE001 (whatever another release makes of an import)
                yield f"{name} cannot be imported: {type(problem).__name__}: {problem}"


def _missing(uses: Uses) -> dict[str, bool]:
    """Return the names that are imported and are not there, with whether each import is checked."""
    missing: dict[str, bool] = {}
    for one in uses.imports:
        if not _is_there(one):
            missing[f"{one.module}.{one.name}"] = missing.get(f"{one.module}.{one.name}", True) and one.checked
    return missing


def _is_there(one: Imported) -> bool:
    try:
        module = importlib.import_module(one.module)
        return hasattr(module, one.name) or bool(importlib.import_module(f"{one.module}.{one.name}"))
    except ImportError:
        return False


def _functions(uses: Uses) -> Iterator[tuple[str, Parameters]]:
    """Return the parameters of the functions that are imported."""
    for one in uses.imports:
        if _is_there(one):
            value = getattr(importlib.import_module(one.module), one.name, None)
            if (asked := parameters(value)) is not None:
                yield f"{one.module}.{one.name}", asked


def _contracts() -> Iterator[str]:
    """Return where this package's classes do not do what theirs ask of them."""
    for module in [one for name, one in sys.modules.items() if name.startswith("vllm_ascend_pd.")]:
        for kind in [
            one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__
        ]:
            if lacking := getattr(kind, "__abstractmethods__", ()):
                yield f"{kind.__name__} lacks {', '.join(sorted(lacking))}"
            for base in kind.__mro__[1:]:
                if base.__module__.partition(".")[0] in PACKAGES:
                    for name, theirs in vars(base).items():
                        yield from _unfit(f"{kind.__name__}.{name}", vars(kind).get(name), theirs)


def _wrappers() -> Iterator[str]:
    """Return the wrappers that cannot be called as what they wrap."""
    for kind in skeletons.MADE:
        for name, value in vars(kind).items():
            if hasattr(value, "__wrapped__"):
                yield from _unfit(f"the wrapper of {kind.__name__}.{name}", value, value.__wrapped__)


def _unfit(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    defined, asked = parameters(ours), parameters(theirs)
    if defined is not None and asked is not None and not accepts(defined, asked):
        yield f"{name}({', '.join(defined)}) is called with ({', '.join(asked)})"


def _changes(sources: Sources, versions: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return for each change of vLLM why it is off, and why it would be if the release were tried; empty: it is on."""
    from vllm_ascend_pd.vllm_patches import compat, tried

    said = []
    for known in (versions, dict.fromkeys(versions, "")):
        with (
            patch.object(tried, "installed", lambda package, known=known: known.get(package, "")),
            patch.object(compat, "is_vllm_ascend", lambda: bool(versions.get(tried.VLLM_ASCEND))),
        ):
            said.append(dict(_off(sources)))
    made = {change: (said[0][change], said[1][change]) for change in said[0]}
    return {change: why for change, why in made.items() if " behind " not in change or why != made[ON_D]}


def _off(sources: Sources) -> Iterator[tuple[str, str]]:
    from vllm_ascend_pd.vllm_patches import (
        first_token,
        front_end,
        older_groups,
        patience,
        resets,
        standstill,
        token_reports,
        tried,
    )

    first, *others = _schedulers(sources)
    plain = _config(first, is_kv_consumer=True)

    def said(ask: Callable[..., Any], *given: Any) -> str:
        try:
            return str(ask(*given) or "")
        except Exception as problem:  # noqa: BLE001 (an engine would end with it)
            return f"{RAISES} {type(problem).__name__}: {problem}"

    yield "preemptions, pauses and weights that are reported", said(resets.install, plain)
    yield "P's first token (P)", said(first_token.install, _config(first, is_kv_consumer=False))
    yield ON_D, said(first_token.install, plain)
    for one in others:
        yield f"P's first token (D behind {one.__name__})", said(first_token.install, _config(one, is_kv_consumer=True))
    yield "P's first token (D with drafts)", said(first_token.install, _config(first, True, SimpleNamespace()))
    yield "P's first token (D's workers)", said(first_token.install_on_worker, plain)
    second = _config(first, True, second=True)
    yield "P's first token (D's workers with the second model runner)", said(first_token.install_on_worker, second)
    yield "P's first token (requests with a grammar)", said(first_token.why_no_grammar, plain)
    yield "answers that go on", said(tried.untried, None, tried.TRIED_GIVEN)
    yield "given tokens one by one in the API server", said(front_end.unfit)
    yield "token ids in streams of responses and messages", said(token_reports.wrap_servers)
    yield "the way out of a standstill", said(standstill.install, plain)
    yield GROUPS, said(older_groups.unproven)
    yield "naps of an engine core", said(lambda: "" if patience.install_nap() else "its engine core steps differently")


def _config(scheduler: type, is_kv_consumer: bool, drafts: Any = None, second: bool = False) -> Any:
    settings = SimpleNamespace(reasoning_parser="", disable_any_whitespace=False, disable_additional_properties=False)
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_consumer=is_kv_consumer, is_kv_producer=not is_kv_consumer),
        scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: scheduler),
        model_config=SimpleNamespace(logits_processors=None, logprobs_mode="raw_logprobs"),
        structured_outputs_config=settings,
        speculative_config=drafts,
        use_v2_model_runner=second,
    )


def _schedulers(sources: Sources) -> Iterator[type]:
    """Return vLLM's scheduler, and those of vllm-ascend that stand in its place."""
    from vllm.v1.core.sched.scheduler import Scheduler

    yield Scheduler
    for name, text in sources.texts.items():
        if name.startswith("vllm_ascend.core."):
            for each in _CLASS.findall(text):
                kind = getattr(importlib.import_module(name), each)
                if issubclass(kind, Scheduler):
                    yield kind


def _kinds(sources: Sources) -> Iterator[str]:
    """Return the specs of KV caches."""
    from vllm.v1.kv_cache_interface import KVCacheSpec

    for name, text in sources.texts.items():
        if "kv_cache_interface" in text or name.endswith("kv_cache_interface"):
            for each in re.findall(r"^class (\w+Specs?)\b", text, re.MULTILINE):
                kind = getattr(importlib.import_module(name), each)
                if isinstance(kind, type) and issubclass(kind, KVCacheSpec) and kind is not KVCacheSpec:
                    yield each


def _fields(sources: Sources) -> dict[str, list[str]]:
    """Return the request fields and sampling parameters that this package's tables lack."""
    from vllm_ascend_pd.protocol.sampling import PARAMETERS
    from vllm_ascend_pd.router.core.bodies import FIELDS

    requests = [kind for name in ("CompletionRequest", "ChatCompletionRequest") for kind in sources.classes(name)]
    asked = {name for kind in requests for name in fields(kind) if not name.startswith("_")}
    given = {name for kind in sources.classes("SamplingParams") for name in fields(kind)}
    return {
        "request fields": sorted(asked - FIELDS.keys()),
        "sampling parameters": sorted(given - PARAMETERS.keys()),
    }


def _members(sources: Sources, uses: Uses) -> dict[str, dict[str, Parameters | None]]:
    """Return members and parameters of the classes that this package names, or calls its variables by."""
    named = {flat(word) for word in uses.words}
    every = {each for text in sources.texts.values() for each in _CLASS.findall(text)}
    by_class: dict[str, dict[str, Parameters | None]] = {}
    for name in sorted(every):
        if flat(name) in named:
            for kind in sources.classes(name):
                by_class.setdefault(name, {}).update(members(kind))
    return by_class


def _words(sources: Sources, uses: Uses) -> set[str]:
    there = {word for text in sources.texts.values() for word in re.findall(r"\w+", text)}
    return uses.words & there


def read(files: Iterable[tuple[str, Path]]) -> Sources:
    """Return the modules of the packages in these distributions."""
    named = [(project.lower().replace("-", "_"), file) for project, file in files]
    return Sources(
        {f"{name}/{path}": text for name, file in named for path, text in sdist.read(file, name, ".py").items()}
    )


if __name__ == "__main__":
    as_new = AS_NEW if "--as-new" in sys.argv else ""
    given = [word.split("=") for word in sys.argv[1:] if "=" in word]  # project=version=file
    made = read([(project, Path(file)) for project, _, file in given])
    print(json.dumps(facts(made, {project: as_new + version for project, version, _ in given})))
