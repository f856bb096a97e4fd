# SPDX-License-Identifier: Apache-2.0
"""A whole cluster on a simulated clock, from one seed: the production code of protocol/, geometry/ and the decisions,
with the engines, the network, the wire and the metaserver replaced at the edges."""
