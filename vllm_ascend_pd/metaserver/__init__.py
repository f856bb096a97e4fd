# SPDX-License-Identifier: Apache-2.0
"""The metaserver: D's client for it (`client`), its pure decisions, and the HTTP service itself (`service`).

Engines import the client and the reports. They never import `service`, which needs Starlette and uvicorn.
"""
