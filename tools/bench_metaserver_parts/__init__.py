# SPDX-License-Identifier: Apache-2.0
"""Programs that a benchmark of the metaserver starts: `python -m tools.bench_metaserver_parts.load`."""
