# SPDX-License-Identifier: Apache-2.0
"""torch_npu and one engine of vllm-ascend on a CANN in host memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from host_build import BASE, OLDER, HostBuild

from tools.support import on_cpu
from tools.support.models import RECIPES, ensure
from tools.support.spec import child_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).resolve().parent


def run(build: HostBuild, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = child_environment(build.plugins, npu=True) | build.variables() | environment
    command = [str(build.python), "-W", "ignore", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


TORCH = """
import torch

x = torch.arange(12.0).view(3, 4)
y = x.npu()
assert y.device.type == "npu" and torch.equal(y.cpu(), x)
y[1:, ::2].mul_(10)  # a view writes into the same memory
x[1:, ::2].mul_(10)
assert torch.equal(y.cpu(), x)
y[torch.tensor([2, 0], device="npu")] = torch.ones(2, 4, device="npu")
x[[2, 0]] = 1.0
assert torch.equal((y @ y.t()).cpu(), x @ x.t())
out = torch.empty(0, device="npu")
torch.add(y, 1, out=out)  # an output takes the size of what is written into it
assert torch.equal(out.cpu(), x + 1)
values, order = y.sort(-1)
assert torch.equal(order.cpu(), x.sort(-1)[1]) and int(y.argmax()) == int(x.argmax())
assert torch.equal(y.to(torch.bfloat16).cpu(), x.to(torch.bfloat16))
print("as on the CPU")
"""


def test_torch_on_the_npu_computes_as_on_the_cpu(build: HostBuild) -> None:
    assert said(run(build, "-c", TORCH)) == "as on the CPU"


RELEASE = """
from pathlib import Path

import torch

torch.ones(2).npu().add_(1).cpu()
slack = set()
for thread in Path("/proc/self/task").iterdir():
    if (thread / "comm").read_text().strip() == "release_thread":
        slack.add(Path("/proc", thread.name, "timerslack_ns").read_text().strip())
print(slack)
"""


def test_release_threads_of_torch_npu_sleep(build: HostBuild) -> None:
    assert said(run(build, "-c", RELEASE)) == "{'5000000'}"


def test_an_operator_without_a_reference_stops_the_process_and_names_itself(build: HostBuild) -> None:
    done = run(build, "-c", "import torch; torch.ops.npu.npu_fast_gelu(torch.ones(2).npu()); print('lived on')")
    assert done.returncode == 74
    assert "no reference for the operator npu::npu_fast_gelu" in done.stderr
    assert "lived on" not in done.stdout


LATE = """
import torch

cache = torch.zeros(4, 128, 1, 8, device="npu")
new = torch.ones(2, 1, 8, device="npu")
slots = torch.tensor([0, 130], dtype=torch.int32, device="npu")
torch.npu.synchronize()
written, read = torch.npu.Event(), torch.npu.Stream()
torch.ops.atb._npu_reshape_and_cache(new, new, cache, cache.clone(), slots)
written.record()
assert float(cache.sum()) == 16, "the stream that writes sees what it wrote"
with torch.npu.stream(read):
    early = float(cache.sum())
    read.wait_event(written)
    after = float(cache.sum())
print(early, after)
"""


def test_a_read_of_a_late_cache_without_waiting_finds_old_bytes(build: HostBuild) -> None:
    assert said(run(build, "-c", LATE, STAND_IN_LATE_US="300000", STAND_IN_SEED="3")) == "0.0 16.0"


GRAPH = """
import torch

x, rows = torch.zeros(4, 8, device="npu"), torch.zeros(4, dtype=torch.long, device="npu")
weight, table, cache = torch.randn(8, 8).npu(), torch.randn(10, 8).npu(), torch.zeros(10, 8, device="npu")

def step():
    y = ((table.index_select(0, rows) + x) @ weight).relu()
    q, k = y.split([4, 4], -1)
    q.mul_(2.0)  # into a view
    cache[rows] = y
    return torch.cat((k, q), -1).view(4, 2, 4).transpose(0, 1).reshape(4, 8), y.sum(-1)

graph = torch.npu.NPUGraph()
with torch.inference_mode(), torch.npu.graph(graph):
    captured = step()
for _ in range(5):
    x.copy_(torch.randn(4, 8))
    rows.copy_(torch.randperm(10)[:4])
    cache.zero_()
    graph.replay()
    replayed = [each.cpu() for each in (*captured, cache)]
    cache.zero_()
    assert all(map(torch.equal, replayed, [each.cpu() for each in (*step(), cache)]))

# An attention whose lengths come later: the replay waits until another stream has given them and says so.
q, k, out, lse = (torch.randn(2, 4, 16).npu() for _ in range(4))
keys = torch.randn(3, 128, 64).npu()
blocks = torch.tensor([[1], [2]], dtype=torch.int32).npu()
fixed = {"block_table": blocks, "input_layout": "TND", "block_size": 128, "num_heads": 4, "num_key_value_heads": 4, "sparse_mode": 0}
attend = torch.ops.npu.npu_fused_infer_attention_score
other = torch.npu.Stream()
graph, updated = torch.npu.NPUGraph(), torch.npu.ExternalEvent()
with torch.inference_mode(), torch.npu.graph(graph):
    stream = torch.npu.current_stream()
    updated.wait(stream)
    updated.reset(stream)
    torch.npu.graph_task_group_begin(stream)
    attend.out(q, keys, keys, actual_seq_lengths=[1, 2], actual_seq_lengths_kv=[1, 1], out=[out, lse], **fixed)
    group = torch.npu.graph_task_group_end(stream)
for lengths in ([3, 99], [128, 1]):
    graph.replay()
    with torch.npu.stream(other):
        torch.npu.graph_task_update_begin(other, group)
        attend.out(q, keys, keys, actual_seq_lengths=[1, 2], actual_seq_lengths_kv=lengths, out=[out, lse], **fixed)
        torch.npu.graph_task_update_end(other)
        updated.record(other)
    replayed = out.cpu()
    direct, _ = attend(q, keys, keys, actual_seq_lengths=[1, 2], actual_seq_lengths_kv=lengths, **fixed)
    assert torch.equal(replayed, direct.cpu())
print("as captured")
"""


@pytest.mark.parametrize("delay", ["0", "3000"])
def test_a_replayed_graph_computes_what_its_operators_do(build: HostBuild, delay: str) -> None:
    assert said(run(build, "-c", GRAPH, STAND_IN_DELAY_US=delay)) == "as captured"


def test_collectives_between_two_processes(build: HostBuild) -> None:
    delays = {"STAND_IN_DELAY_US": "500"}
    assert said(run(build, str(HERE / "collectives.py"), **delays)) == "as worked out by hand"


def hooked(build: HostBuild, name: str, dtype: str) -> tuple[dict[str, Any], list[list[str]]]:
    """Return the caches that a P registers, and its hooks of one step as [hook, layer]. All steps are alike."""
    output = json.loads(said(run(build, str(HERE / "hooks.py"), str(ensure(name)), dtype, VLLM_HOST_IP="127.0.0.1")))
    for parts in output["caches"].values():
        assert all(part["format"] in (0, 2, 30) and part["device"] == 0 for part in parts)
    calls, steps = [call for call in output["calls"] if call[0] != "over"], 4  # 600 tokens in chunks of 512, two tokens
    assert output["calls"].count(["over", ""]) >= steps
    step = calls[: len(calls) // steps]
    assert calls == step * steps
    return output["caches"], step


LATENT, INDEX = [[128, 1, 512], [128, 1, 64]], [128, 1, 128]


@pytest.mark.engines
@pytest.mark.parametrize(
    ("release", "name", "dtype", "shapes", "written"),
    [
        # K and V are separate tensors, token before head; MLA's are the latent and the rotary part.
        (BASE, "gqa", "float32", {"attn": [[128, 4, 32], [128, 4, 32]]}, False),
        (BASE, "mla", "bfloat16", {"attn": LATENT}, True),
        (BASE, "dsv32", "bfloat16", {"attn": LATENT, "k_cache": [INDEX]}, True),
        (OLDER, "dsv32", "bfloat16", {"attn": [*LATENT, INDEX]}, True),
    ],
)
def test_how_the_model_runner_calls_a_connector(
    release: str,
    name: str,
    dtype: str,
    shapes: dict[str, list[list[int]]],
    written: bool,
    request: pytest.FixtureRequest,
) -> None:
    """Caches as registered, and each layer's hooks.

    on_kv_cache_written, which has the layer's name only with MLA, then save_kv_layer with the registered tensors. An
    indexer that is a layer has neither, and its attention saves other tensors: this package looks at none. 0.30's K and
    V of a layer take turns block by block.
    """
    build = request.getfixturevalue("build" if release == BASE else "older")
    caches, step = hooked(build, name, dtype)
    by_kind = {layer: layer.rpartition(".")[2] for layer in caches}
    assert len(caches) == RECIPES[name].layers * len(shapes) and set(by_kind.values()) == shapes.keys()
    for layer, parts in caches.items():
        assert [part["shape"][1:] for part in parts] == shapes[by_kind[layer]]
        assert all(part["contiguous"] is not (release == BASE and name == "gqa") for part in parts)
    with_hooks = [layer for layer, kind in by_kind.items() if kind == "attn"]
    saved = "saved" if len(shapes) == 1 else "saved others"
    assert step == [call for layer in with_hooks for call in (["written", layer if written else ""], [saved, layer])]


@pytest.mark.engines
@pytest.mark.parametrize("release", [BASE, OLDER])
def test_a_recurrent_layer_calls_a_connector_without_name_and_tensors(
    release: str, request: pytest.FixtureRequest
) -> None:
    """0.30 has a page for both states of a block, and K and V take turns over the same bytes."""
    build = request.getfixturevalue("build" if release == BASE else "older")
    caches, step = hooked(build, "qwen3next", "bfloat16")
    attention = "model.layers.3.self_attn.attn"
    assert caches.keys() == {attention, *(f"model.layers.{n}.linear_attn" for n in range(3))}
    shapes = {name: [part["shape"][1:] for part in parts] for name, parts in caches.items()}
    assert shapes.pop(attention) == [[128, 2, 64], [128, 2, 64]]
    assert all(part["contiguous"] is (release == OLDER) for parts in caches.values() for part in parts)
    assert all(states == [[3, 1024], [8, 64, 64]] for states in shapes.values())
    assert step == [*[["saved", ""]] * 3, ["written", ""], ["saved", attention]]


@pytest.mark.engines
@pytest.mark.parametrize("name", ["gqa", "moe"])
def test_one_engine_answers_as_vllm_does_on_the_cpu(build: HostBuild, name: str) -> None:
    program, model = str(HERE / "one_engine.py"), str(ensure(name))
    on_npu = said(run(build, program, model, json.dumps({"dtype": "float32"})))
    words = [program, model, json.dumps({"dtype": "float32", "block_size": 32})]
    env = child_environment() | on_cpu.ENVIRONMENT
    on_host = subprocess.run(
        [sys.executable, "-W", "ignore", *words], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert json.loads(on_npu) == json.loads(said(on_host))
