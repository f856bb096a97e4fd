# SPDX-License-Identifier: Apache-2.0
"""Reading of the shared secret from its file, which may change. It is never logged and never part of an error."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from vllm_ascend_pd.config import ChannelConfig
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.protocol.auth import MIN_SECRET_BYTES, Secrets

MAX_SECRET_BYTES = 4096
LOOK_S = 1.0  # between two looks at the files
SETTLED_S = 2.0  # after a change: the other file may follow

log = logging.getLogger(__name__)


def load_secrets(config: ChannelConfig) -> Secrets | None:
    """Return the secrets of the configuration; None if none is configured. Raise PD-SEC-001 if a file is of no use."""
    return SecretFiles(config.secret_file, config.secret_file_previous) if config.secret_file else None


class SecretFiles(Secrets):
    """Secrets of files, read again once these have changed. Of files that are of no use the last ones stay.

    Whoever asks looks, so there is no thread. Two threads may read at once: both find the same.
    """

    def __init__(self, *paths: str) -> None:
        self._paths = [path for path in paths if path]
        self._made_of, self._looked, self._problem = _stamps(self._paths), time.monotonic(), ""
        super().__init__(*map(read_secret, self._paths))

    @property
    def accepted(self) -> tuple[bytes, ...]:
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            try:
                self._look()
                self._problem = ""
            except ConfigError as problem:
                if str(problem) != self._problem:
                    log.warning("the last secrets stay in use: %s", problem)
                self._problem = str(problem)
        return self._accepted

    def _look(self) -> None:
        stamps = _stamps(self._paths)
        if stamps != self._made_of and max(stamps)[0] < (time.time() - SETTLED_S) * 1e9:
            self._accepted = tuple(map(read_secret, self._paths))
            self._made_of = stamps
            log.info("secret_file has changed and was read again")


def _stamps(paths: Sequence[str]) -> list[tuple[int, int]]:
    """Return what tells one content of the files from another. Raise ConfigError if one is missing."""
    try:
        return [(one.st_ctime_ns, one.st_ino) for one in map(os.stat, paths)]
    except OSError as error:
        raise ConfigError("PD-SEC-001", path=error.filename, why=error.strerror or str(error)) from error


def read_private(path: str, code: str) -> bytes:
    """Return the content of a file that only its owner may read, without surrounding white space.

    Raise ConfigError with `code` if the file is of no use.
    """
    file = Path(path)
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait
            raise ConfigError(code, path=path, why="it is not a regular file")
        if status.st_mode & _of_others(status):
            raise ConfigError(code, path=path, why=f"others may read it (mode {stat.S_IMODE(status.st_mode):04o})")
        if status.st_size > MAX_SECRET_BYTES:
            raise ConfigError(code, path=path, why=f"it is larger than {MAX_SECRET_BYTES} bytes")
        return file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(code, path=path, why=error.strerror or str(error)) from error


def _of_others(status: os.stat_result) -> int:
    """Return the permissions by which others than this process would read or write a file.

    A pod that is not root gets its secrets as root's files, which its own group may read.
    """
    own_group = status.st_uid != os.geteuid() and status.st_gid in {os.getegid(), *os.getgroups()}
    return 0o037 if own_group else 0o077


def read_secret(path: str) -> bytes:
    """Return the secret without surrounding white space; only its owner may read the file."""
    secret = read_private(path, "PD-SEC-001")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError("PD-SEC-001", path=path, why=f"it holds {len(secret)} bytes, {MIN_SECRET_BYTES} are wanted")
    return secret
