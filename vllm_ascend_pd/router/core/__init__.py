# SPDX-License-Identifier: Apache-2.0
"""The pure part of the router: its decisions about engines, and what it reads of bodies and answers."""
