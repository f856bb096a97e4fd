# SPDX-License-Identifier: Apache-2.0
"""The protocol with one rule removed at a time; the simulator must find each of them, which proves that it checks.

None of this is in the package: rules are removed by replacing a machine, a guard, a cell or the fence. A file for each
room whose rules they are, with its mutations at its end.
"""

from __future__ import annotations

from simulation.mutations import decode_scheduler, decode_worker, pairs, prefill_scheduler, prefill_worker
from simulation.mutations.mutation import Mutation as Mutation

_ROOMS = (pairs, prefill_scheduler, prefill_worker, decode_scheduler, decode_worker)
ALL = {mutation.name: mutation for room in _ROOMS for mutation in room.MUTATIONS}
