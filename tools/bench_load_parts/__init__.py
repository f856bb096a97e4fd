# SPDX-License-Identifier: Apache-2.0
"""Parts of scripts/bench_load.sh: loads, systems, clients, figures and the plot."""
