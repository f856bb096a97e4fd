# SPDX-License-Identifier: Apache-2.0
"""The pure part of D's scheduler: its requests, their loads, P's first tokens and offers."""
