# SPDX-License-Identifier: Apache-2.0
"""HTTP as D and the metaserver speak it: a client over sockets, httpx over it, time limits, what may be sent again."""
