# SPDX-License-Identifier: Apache-2.0
"""The catalogue of errors: the page matches the code, and all errors that the package raises are in it, with their
values."""

from __future__ import annotations

import ast
import difflib
import functools
import pickle
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ascend_pd import errors
from vllm_ascend_pd.errors import CATALOGUE, ConfigError, PdError, RemoteProtocolError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_ascend_pd"
CODE = re.compile(r"PD-[A-Z]+-[0-9]{3}")
KINDS = {"PdError", "ConfigError", "RemoteProtocolError"}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "errors.py":
            yield path, ast.parse(path.read_text())


@functools.cache
def literals() -> dict[str, str]:
    """Map every code that is a string in the package's code (docstrings excluded) to the files."""
    codes: dict[str, str] = {}
    for path, tree in sources():
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                for code in CODE.findall(node.value):
                    codes.setdefault(code, f"{path.relative_to(ROOT)}:{node.lineno}")
    return codes


def raised() -> list[tuple[str, str, ast.Call]]:
    """Every error that is built with a literal code and values named in the source: file and line, code, call."""
    calls = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            first = node.args[0]
            named = all(keyword.arg for keyword in node.keywords)  # not **values
            if named and name in KINDS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                calls.append((f"{path.relative_to(ROOT)}:{node.lineno}", first.value, node))
    return calls


def fields(code: str) -> dict[str, str]:
    """Map the values that an entry needs to their format specifications."""
    entry = CATALOGUE[code]
    parts = [*string.Formatter().parse(entry.sentence), *string.Formatter().parse(entry.remedy)]
    return {name: spec or "" for _, name, spec, _ in parts if name}


def test_the_page_is_what_the_code_prints() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    differences = list(
        difflib.unified_diff(
            page.splitlines(), errors.reference().splitlines(), "docs/errors.md", "the code", lineterm="", n=0
        )
    )
    assert not differences, "python -m vllm_ascend_pd.errors > docs/errors.md\n" + "\n".join(differences)


def test_every_code_of_the_package_is_in_the_catalogue() -> None:
    assert {code: where for code, where in literals().items() if code not in CATALOGUE} == {}


def test_every_code_of_the_catalogue_is_used() -> None:
    assert [code for code in CATALOGUE if code not in literals()] == []


@pytest.mark.parametrize(("where", "code", "call"), raised(), ids=lambda value: value if isinstance(value, str) else "")
def test_an_error_is_given_exactly_the_values_that_its_sentences_name(where: str, code: str, call: ast.Call) -> None:
    assert code in CATALOGUE, where
    wanted = fields(code)
    given = {keyword.arg for keyword in call.keywords}
    assert given == set(wanted), where
    values: dict[str, object] = {name: 4096 if wanted[name] else name for name in wanted}
    kind = getattr(errors, getattr(call.func, "id", getattr(call.func, "attr", "")))
    error = kind(code, **values)
    assert str(error).startswith(f"{code}: ")
    assert "{" not in error.sentence + error.remedy


def test_numbers_that_are_shown_in_hexadecimal_are_numbers() -> None:
    error = PdError("PD-WIRE-002", rc=-7, length=4096, address=0x7F00_0000)
    assert "4096 bytes at 0x7f000000" in error.sentence
    with pytest.raises(ValueError):
        PdError("PD-WIRE-002", rc=-7, length=4096, address="somewhere")


@pytest.mark.parametrize("kind", [PdError, ConfigError, RemoteProtocolError])
def test_an_error_survives_the_way_to_another_process(kind: type[PdError]) -> None:
    error = kind("PD-CONF-001", key="lease", nearest="lease_s")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.code, copy.values) == (str(error), error.code, error.values)


def test_an_error_names_its_code_and_its_remedy() -> None:
    text = str(PdError("PD-CONF-001", key="lease", nearest="lease_s"))
    assert text.startswith("PD-CONF-001: Unknown key 'lease'")
    assert "Did you mean 'lease_s'?" in text


def test_codes_of_one_family_stand_together_and_ascend() -> None:
    """Otherwise the page has two sections of one family, or a code is used twice."""
    families = list(dict.fromkeys(code.split("-")[1] for code in CATALOGUE))
    assert list(CATALOGUE) == sorted(CATALOGUE, key=lambda code: (families.index(code.split("-")[1]), code))
    assert all(CODE.fullmatch(code) for code in CATALOGUE)
