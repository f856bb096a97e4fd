# SPDX-License-Identifier: Apache-2.0
"""docs/recipes.md is what tools.recipes prints, and each of its engines would start."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from tools import field as field_page
from tools import recipes
from tools.recipes import RECIPES, FieldRecipe, Sized
from tools.support import can, field, sdist, small
from tools.support.models import ROOT
from vllm_ascend_pd.geometry.decide import MIN_SPAN, decide

FIELD = (ROOT / "docs" / "field.md").read_text()
SECOND = "--headless"


def engines(recipe: FieldRecipe) -> list[field.Judged]:
    """Return admission's word on each `vllm serve` that the page has for a recipe, under the recipe's release."""
    section = recipes.PAGE.read_text().partition(f"\n## {recipe.title}\n")[2].partition("\n## ")[0]
    block = section.partition("```\n")[2].partition("```")[0].replace("\\\n", "")
    known = replace(field.known_models(), base=can.OLD if recipe.older else can.NEW)
    verdicts = []
    for line in block.splitlines():
        words = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)]
        if words[0] == "vllm":
            judged = field.judge(field.Command(words[2], tuple(words[3:])), known)
            assert not judged.unknown, line
            verdicts.append(judged)
    return verdicts


def test_the_page_is_what_is_printed() -> None:
    page = recipes.PAGE.read_text()
    assert recipes.filled(page) == page, "python -m tools.recipes --write"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_p_and_d_of_a_recipe_would_start_and_fit_each_other(recipe: FieldRecipe) -> None:
    verdicts = engines(recipe)
    assert len(verdicts) == recipe.p.hosts + recipe.d.hosts
    assert not [refused for one in verdicts for refused in one.refusals]
    (p,), (d,) = ({one.geometry for one in verdicts if one.role == role} for role in ("P", "D"))
    assert p is not None and d is not None and not field.mismatches(p, d)
    planned = recipes.planned(recipe)
    if planned and not recipe.draft:  # `plan` knows a draft of the model's own heads alone
        assert planned["mode"] == decide(p, d, "auto", MIN_SPAN).mode
    for role, sized in (("P", recipe.p), ("D", recipe.d)):
        assert {(one.tp, one.dp) for one in verdicts if one.role == role} == {(sized.tp, sized.dp)}
        assert sized.tp * sized.dp in (sized.hosts * recipes.NPUS, recipes.NPUS), "no NPU is left"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_what_stands_for_a_recipe_in_small_is_what_the_field_page_says(recipe: FieldRecipe) -> None:
    rows = [line for line in FIELD.splitlines() if line.startswith(f"| {recipe.configuration} |")]
    (row,) = [row for row in rows if (row.count("|") == 5) == recipe.older]
    shown = row.strip("| ").rpartition(" | ")[2]
    assert shown.startswith(f"`{recipe.in_small}`" if recipe.in_small else "–:"), shown
    assert recipe.in_small in ("", *small.sets())


def test_each_family_of_the_field_that_would_start_has_a_recipe() -> None:
    """Of a family's generations one: GLM-4.7 and DeepSeek-V4.1 are refused, the others differ in sizes alone."""
    elsewhere = {"GLM-4.7", "DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro", "GLM-5.2", "Qwen3-VL-235B", "Qwen3.5-122B"}
    families = {recipes.FACTS["models"][recipe.model]["family"] for recipe in RECIPES}
    assert families | elsewhere == recipes.FACTS["families"].keys() and not families & elsewhere


def test_sizes_are_those_of_vllm_ascends_own_configurations() -> None:
    for pin in (sdist.VLLM_ASCEND, sdist.OLDER):
        try:
            path = sdist.ensure(pin)
        except sdist.Unreachable as problem:
            pytest.skip(str(problem))
        texts = sdist.read(path, field_page.FOLDER, (".yaml",))
        named = {field_page.name_of(PurePosixPath(name)): text for name, text in texts.items() if "kv_producer" in text}
        for recipe in RECIPES:
            if recipe.older == (pin is sdist.OLDER):
                sizes = {sized_of(command) for command in field.commands(named[recipe.configuration])}
                assert sizes == {("kv_producer", recipe.p), ("kv_consumer", recipe.d)}, recipe.title
                assert {command.model for command in field.commands(named[recipe.configuration])} == {recipe.model}


def sized_of(command: field.Command) -> tuple[str, Sized]:
    flags = {name: (values or [""])[0] for name, values in field.flags_of(command.words).items()}
    numbers = ("--tensor-parallel-size", "--data-parallel-size", "--max-model-len", "--max-num-batched-tokens")
    tp, dp, length, tokens = (int(flags[name]) for name in numbers)
    drafts = re.search(r'"num_speculative_tokens": *(\d+)', flags.get("--speculative-config", ""))
    role = "kv_producer" if "kv_producer" in flags["--kv-transfer-config"] else "kv_consumer"
    memory, buffer = flags["--gpu-memory-utilization"], int(command.environment["HCCL_BUFFSIZE"])
    requests, prefixes = int(flags["--max-num-seqs"]), "--no-enable-prefix-caching" not in flags
    return role, Sized(tp, dp, length, tokens, requests, memory, buffer, int(drafts[1]) if drafts else 0, prefixes)
