# SPDX-License-Identifier: Apache-2.0
"""Reading of the shared secret from its file. The secret is never logged and never part of an error."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from vllm_ascend_pd.config import ChannelConfig
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.protocol.auth import MIN_SECRET_BYTES, Secrets

MAX_SECRET_BYTES = 4096


def load_secrets(config: ChannelConfig) -> Secrets | None:
    """Return the secrets of the configuration; None if none is configured. Raise PD-SEC-001 if a file is of no use."""
    if not config.secret_file:
        return None
    previous = read_secret(config.secret_file_previous) if config.secret_file_previous else None
    return Secrets(read_secret(config.secret_file), previous)


def read_private(path: str, code: str) -> bytes:
    """Return the content of a file that only its owner may read, without surrounding white space.

    Raise ConfigError with `code` if the file is of no use.
    """
    file = Path(path)
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait
            raise ConfigError(code, path=path, why="it is not a regular file")
        if found.st_mode & _of_others(found):
            raise ConfigError(code, path=path, why=f"others may read it (mode {stat.S_IMODE(found.st_mode):04o})")
        if found.st_size > MAX_SECRET_BYTES:
            raise ConfigError(code, path=path, why=f"it is larger than {MAX_SECRET_BYTES} bytes")
        return file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(code, path=path, why=error.strerror or str(error)) from error


def _of_others(found: os.stat_result) -> int:
    """Return the permissions by which others than this process would read or write a file.

    A pod that is not root gets its secrets as root's files, which its own group may read.
    """
    own_group = found.st_uid != os.geteuid() and found.st_gid in {os.getegid(), *os.getgroups()}
    return 0o037 if own_group else 0o077


def read_secret(path: str) -> bytes:
    """Return the secret without surrounding white space; only its owner may read the file."""
    secret = read_private(path, "PD-SEC-001")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError("PD-SEC-001", path=path, why=f"it holds {len(secret)} bytes, {MIN_SECRET_BYTES} are wanted")
    return secret
