# SPDX-License-Identifier: Apache-2.0
"""Subcommands and flags of a parser of commands. argparse has no public way to list them."""

from __future__ import annotations

import argparse


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [group] = [action for action in parser._actions if isinstance(action.choices, dict)]
    return dict(group.choices or {})


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return what each flag does, with those that the help hides."""
    return dict(parser._option_string_actions)
