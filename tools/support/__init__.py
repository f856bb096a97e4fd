# SPDX-License-Identifier: Apache-2.0
"""Shared code of the quickstart, the benchmarks and the integration tests.

`models` makes small random models, `cluster` starts and stops engines, `client` sends requests, `compare` compares
answers, `timeline` reads traces. Of the package only its reader of traces is imported here; its command line runs in
child processes.
"""
