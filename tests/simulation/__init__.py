# SPDX-License-Identifier: Apache-2.0
"""Simulation of a whole cluster on a simulated clock, from one seed.

The code of protocol/, geometry/ and the decisions is the production code; the engines, the network, the wire and the
metaserver are replaced.
"""
