# SPDX-License-Identifier: Apache-2.0
"""The metaserver: its pure decisions, what it reads of bodies and answers, and the HTTP service itself (`service`).

Only `service` needs aiohttp. Engines import nothing from here.
"""
