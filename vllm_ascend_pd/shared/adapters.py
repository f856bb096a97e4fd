# SPDX-License-Identifier: Apache-2.0
"""Identity of a LoRA adapter by its files: the same on P and D wherever they lie, another for other weights."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

_AT_ONCE, _PLACES = 4096, 256  # of a weights file: training changes nearly all of it, and a step must not wait for it
_LOCAL = "base_model_name_or_path"  # in the configuration: where the base model lies on one host


def adapter_identity(lora: Any) -> str | None:
    """Return a word for the adapter of a request; None: it has none.

    Names are given by operators, and a name is given to new weights too. An adapter whose files are not on this host,
    but a repository's, is known by its name and that of the repository.
    """
    if lora is None:
        return None
    folder = Path(lora.lora_path)
    try:
        stamps = tuple((file.name, *_stamp(file.stat())) for file in sorted(folder.glob("adapter_*")))
        return f"{lora.lora_name} {_digest(folder, stamps) if stamps else lora.lora_path}"
    except (OSError, ValueError) as problem:
        return f"{lora.lora_name} {problem}"


def _stamp(of: os.stat_result) -> tuple[int, int, int]:
    return of.st_size, of.st_mtime_ns, of.st_ino


@lru_cache(maxsize=1024)
def _digest(folder: Path, stamps: tuple[tuple[str, int, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, size, *_ in stamps:
        digest.update(f"\n{name}\n".encode())
        with (folder / name).open("rb") as file:
            if name.endswith(".json"):
                facts = {key: value for key, value in json.load(file).items() if key != _LOCAL}
                digest.update(json.dumps(facts, sort_keys=True).encode())
                continue
            digest.update(f"{size}\n".encode())
            for place in range(0, size, max(_AT_ONCE, size // _PLACES)):
                file.seek(place)
                digest.update(file.read(_AT_ONCE))
    return digest.hexdigest()
