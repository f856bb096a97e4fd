# SPDX-License-Identifier: Apache-2.0
"""The front door: D's bounded client for it (`client`), its pure decisions, and the HTTP service itself (`service`).

An engine imports `client` only; `service` brings Starlette and uvicorn and is never imported by an engine.
"""
