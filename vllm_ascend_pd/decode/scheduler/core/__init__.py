# SPDX-License-Identifier: Apache-2.0
"""The pure part of D's scheduler: requests and their loads, P's first tokens, offers, and a metaserver's answers."""
