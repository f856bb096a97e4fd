# SPDX-License-Identifier: Apache-2.0
"""The metaserver's HTTP service. Needs aiohttp, which vLLM brings; no engine imports it."""
