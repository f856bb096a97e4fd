# SPDX-License-Identifier: Apache-2.0
"""The pure part of P's scheduler: its requests, and what each step tells the workers."""
