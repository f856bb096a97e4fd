# SPDX-License-Identifier: Apache-2.0
"""TLS contexts of files that are replaced while the process runs, such as short-lived certificates."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable

log = logging.getLogger(__name__)


class TlsFiles:
    """Context for new connections, made anew once a file that it is made of has changed."""

    def __init__(self, make: Callable[[], ssl.SSLContext], *paths: str) -> None:
        self._make, self._paths = make, [path for path in paths if path]
        self._context: ssl.SSLContext | None = None
        self._made_of: list[tuple[int, int, int]] = []

    def context(self) -> ssl.SSLContext:
        """Return the context. Raise OSError if there is none yet and the files cannot be used.

        While files are being replaced, certificate and key may not fit: then the last context is kept.
        """
        try:
            stamps = [(one.st_mtime_ns, one.st_ino, one.st_size) for one in map(os.stat, self._paths)]
            if self._context is None or stamps != self._made_of:
                self._context, self._made_of = self._make(), stamps
        except OSError as problem:  # ssl.SSLError is one
            if self._context is None:
                raise
            log.warning("TLS files cannot be read, the last ones are used: %s", problem)
        return self._context
