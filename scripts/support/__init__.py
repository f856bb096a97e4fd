# SPDX-License-Identifier: Apache-2.0
"""What the quickstart, the benchmarks and the integration tests share.

`models` makes small random models, `cluster` starts and stops engines, `client` talks to them, `compare` judges
answers, `timeline` reads traces. Nothing of the package is imported here except its reader of traces, and its command
line in child processes.
"""
