# SPDX-License-Identifier: Apache-2.0
"""Worlds in which a rule is needed often enough."""

from __future__ import annotations

from dataclasses import replace

from simulation.settings import STATES, Faults, FirstFaults, SimulationSettings
from vllm_ascend_pd.config import RegroupConfig, Timers


def met(settings: SimulationSettings) -> SimulationSettings:
    """Every router sends to P first, or to both at once; no engine has the draft model."""
    settings = replace(settings, windows=(), group_of=(), scales=(), p_first=0.5, at_once=1.0)
    prefill, decode = (
        tuple(replace(shape, drafts=False, pp=1) for shape in side) for side in (settings.prefill, settings.decode)
    )
    faults = replace(settings.faults, undrafted=0.0)
    return replace(roomy(replace(settings, prefill=prefill, decode=decode)), faults=faults)


def kindly_met(settings: SimulationSettings) -> SimulationSettings:
    return met(kind(settings))


def met_astray(settings: SimulationSettings) -> SimulationSettings:
    """Sides come late, twice or never, and P is short of blocks."""
    settings = met(replace(settings, burst=8, faults=Faults(astray=0.3, preempt=0.2, leave=0.1)))
    return replace(settings, timers=replace(settings.timers, hold_s=20.0, meet_s=10.0))


def met_first(settings: SimulationSettings) -> SimulationSettings:
    """D asks for P's first tokens."""
    return replace(met_astray(settings), first=True)


def met_after_restarts(settings: SimulationSettings) -> SimulationSettings:
    """P is restarted all the time, and D comes late for its sources."""
    settings = met(
        replace(settings, burst=8, prefill=settings.prefill[:1], faults=Faults(kill_prefill=0.05, astray=0.5))
    )
    return replace(settings, p_first=1.0, timers=replace(settings.timers, hold_s=20.0))


def cut_off(settings: SimulationSettings) -> SimulationSettings:
    """The side channels of writers are cut in the middle of a prompt, while their data path works."""
    return replace(settings, chunk=4, faults=Faults(partition=0.2))


def stopped_and_killed(settings: SimulationSettings) -> SimulationSettings:
    """Writers die while a stopped D has their writes in its buffers."""
    return replace(settings, faults=Faults(stop_decode=0.1, kill_prefill=0.1, write_slow=0.1))


def killed_after_a_stop(settings: SimulationSettings) -> SimulationSettings:
    """Writers that were stopped write once more before they die."""
    return replace(settings, faults=Faults(submit_stall=0.02, write_stop=0.02, kill_prefill=0.05))


def revoked_in_vain(settings: SimulationSettings) -> SimulationSettings:
    """Writers that are stopped in a write must be shut out, which often fails."""
    return replace(settings, faults=Faults(submit_stall=0.02, write_stop=0.02, revocation=0.7))


def scarce_slots(settings: SimulationSettings) -> SimulationSettings:
    """Exchanges are missed and repeated all the time, and parts of them fail."""
    faults = Faults(exchange_error=0.1, late=0.05, write_slow=0.02)
    always = RegroupConfig(regroup="always")
    return replace(settings, regroup=always, slots=1, slot_destinations=1, room=1, faults=faults)


def slots_read_late(settings: SimulationSettings) -> SimulationSettings:
    """Writes fail, and continue to read the only slot of their destination while others use it."""
    return replace(scarce_slots(settings), faults=Faults(write_error=0.2))


def preempted(settings: SimulationSettings) -> SimulationSettings:
    """Many requests at once are preempted all the time, writes that read their blocks are slow, messages are lost."""
    need = -(-settings.tokens // min(shape.block_size for shape in settings.prefill)) + 1
    return replace(
        settings,
        prefill=tuple(replace(shape, blocks=4 * need) for shape in settings.prefill),
        decode=tuple(replace(shape, pp=1, blocks=20 * need) for shape in settings.decode),
        chunk=16,
        burst=8,
        timers=replace(settings.timers, preempt_drain_s=0.0),
        faults=Faults(preempt=0.2, write_slow=0.2, drop=0.2),
        regroup=RegroupConfig(regroup="never"),
    )


def preempted_patiently(settings: SimulationSettings) -> SimulationSettings:
    """The same, and P waits for readers."""
    return replace(preempted(settings), timers=replace(settings.timers, preempt_drain_s=1.0))


def kind(settings: SimulationSettings) -> SimulationSettings:
    """Nothing fails, and no deadline is near."""
    timers = replace(
        settings.timers,
        recv_deadline_s=600.0,
        stall_timeout_s=600.0,
        ready_timeout_s=600.0,
        preempt_drain_s=1.0,
        hold_s=600.0,
        meet_s=600.0,
    )
    return replace(settings, timers=timers, faults=Faults())


def broken_writers(settings: SimulationSettings) -> SimulationSettings:
    """Transfer engines break, or accept nothing, while writes are slow."""
    return replace(settings, faults=Faults(unissued=0.05, writer_dies=0.01, write_slow=0.1))


def decode_comes_back(settings: SimulationSettings) -> SimulationSettings:
    """A D returns on its address with another session, while writes for its predecessor wait behind slow ones."""
    need = -(-settings.tokens // settings.prefill[0].block_size) + 1
    timers = Timers(stall_timeout_s=20.0, recv_deadline_s=40.0)
    return replace(
        settings,
        prefill=(replace(settings.prefill[0], tp=1, pp=1, blocks=8 * need),),
        decode=(replace(settings.decode[0], tp=1, blocks=10 * need),),
        layers=3,
        indexed=(),
        windows=(),
        group_of=(),
        scales=(),
        chunk=64,
        burst=8,
        gap_s=4.0,
        timers=timers,
        transfer_timeout_s=5.0,
        quiet_s=5.0 + timers.quiet_extra_s,
        regroup=RegroupConfig(regroup="never"),
        faults=Faults(kill_decode=0.05, silent_death=1.0, write_slow=0.7),
        p_first=0.0,
        at_once=0.0,
        first=False,
    )


def drafting(settings: SimulationSettings) -> SimulationSettings:
    """Every engine has the draft model, which sometimes does not run."""
    prefill, decode = (
        tuple(replace(shape, drafts=True) for shape in side) for side in (settings.prefill, settings.decode)
    )
    return replace(settings, prefill=prefill, decode=decode, faults=replace(settings.faults, undrafted=0.2))


def stages(settings: SimulationSettings) -> SimulationSettings:
    """Both sides are pipelines, cut differently."""
    prefill, decode = (
        tuple(replace(shape, pp=pp, late=late) for shape in side)
        for side, pp, late in ((settings.prefill, 3, False), (settings.decode, 2, True))
    )
    return replace(settings, prefill=prefill, decode=decode, layers=4, windows=(), group_of=(), scales=())


def kind_stages(settings: SimulationSettings) -> SimulationSettings:
    return stages(kind(settings))


def indexed(settings: SimulationSettings) -> SimulationSettings:
    """Indexers beside all attentions, of which there are several in a stage."""
    prefill = tuple(replace(shape, pp=1) for shape in settings.prefill)
    return replace(settings, prefill=prefill, layers=3, indexed=(0, 1, 2), windows=(), group_of=(), scales=())


def quantised(settings: SimulationSettings) -> SimulationSettings:
    """Scales beside keys and values, which are pushed without an exchange."""
    regroup = replace(settings.regroup, regroup="never")
    return replace(kind(settings), quantised=2, regroup=regroup)


def parts(settings: SimulationSettings) -> SimulationSettings:
    """D's ranks divide the tokens; no deadline is near."""
    settings = replace(kind(settings), windows=(), group_of=(), scales=(), indexed=(), opaque=False, kv_heads=1)
    decode = tuple(replace(shape, tp=2, dcp=2, pcp=1, interleave=1) for shape in settings.decode)
    return replace(settings.undivided(), decode=decode)


def indexed_parts(settings: SimulationSettings) -> SimulationSettings:
    """Indexers beside latents that D's ranks divide."""
    return replace(parts(indexed(settings)), indexed=(0, 1, 2))


def windows(settings: SimulationSettings) -> SimulationSettings:
    """Groups that share addresses: two windows, and layers that need all tokens; no deadline is near."""
    prefill = tuple(replace(shape, pp=1) for shape in settings.prefill)
    settings = replace(
        kind(settings), prefill=prefill, tokens=max(settings.tokens, 24), windows=(), group_of=(), scales=()
    )
    return roomy(settings).grouped((5, 0, 9), (0, 1, 2, 0, 2), (1, 1, 1))


def roomy(settings: SimulationSettings) -> SimulationSettings:
    need = -(-settings.tokens // min(shape.block_size for shape in (*settings.prefill, *settings.decode))) + 1
    prefill, decode = (
        tuple(replace(shape, blocks=3 * need) for shape in side) for side in (settings.prefill, settings.decode)
    )
    return replace(settings, prefill=prefill, decode=decode)


def windows_in_need(settings: SimulationSettings) -> SimulationSettings:
    """The same with few blocks on P, which are reused as soon as they are behind a window, and slow writes."""
    settings = replace(windows(settings), chunk=16, burst=8, faults=Faults(write_slow=0.3))
    need = -(-settings.tokens // settings.prefill[0].block_size) + 1
    return replace(settings, prefill=tuple(replace(shape, blocks=4 * need + 1) for shape in settings.prefill))


def states(settings: SimulationSettings) -> SimulationSettings:
    """States of two groups beside layers that need all tokens, and layers with a window; no deadline is near."""
    return kept(settings, (STATES, 0, STATES, 5), (0, 1, 2, 0, 3))


def states_alone(settings: SimulationSettings) -> SimulationSettings:
    """Nothing but states, and a token in each step."""
    return replace(kept(settings, (STATES,), (0, 0)), chunk=1)


def states_in_need(settings: SimulationSettings) -> SimulationSettings:
    """Few tokens in each step, few blocks on P, and slow writes."""
    settings = replace(kept(settings, (STATES, 0), (0, 1, 0)), chunk=3, burst=8, faults=Faults(write_slow=0.3))
    need = -(-settings.tokens // settings.prefill[0].block_size) + 1
    return replace(settings, prefill=tuple(replace(shape, blocks=3 * need + 1) for shape in settings.prefill))


def compressed(settings: SimulationSettings) -> SimulationSettings:
    """Layers with an entry for 3 tokens, or for 5, beside a window, in steps that end inside of one."""
    settings = replace(settings.undivided(), opaque=False, p_first=0.0, at_once=0.0)
    return replace(kept(settings, (-3, 9, -5), (0, 1, 2)), chunk=4, burst=8)


def kept(settings: SimulationSettings, windows: tuple[int, ...], group_of: tuple[int, ...]) -> SimulationSettings:
    prefill = tuple(replace(shape, pp=1) for shape in settings.prefill)
    settings = replace(
        kind(settings), prefill=prefill, tokens=max(settings.tokens, 24), windows=(), group_of=(), scales=()
    )
    return roomy(settings).grouped(windows, group_of, (1,) * len(windows))


def orphans(settings: SimulationSettings) -> SimulationSettings:
    """The ranks of a dead scheduler go on for a while, beside those of the next."""
    return replace(settings, faults=Faults(kill_prefill=0.1, orphans=1.0, write_slow=0.1, silent_death=1.0))


def ahead(settings: SimulationSettings) -> SimulationSettings:
    """Steps are planned ahead, and begin with what the step before computes."""
    return replace(shared(settings), ahead=True, chunk=8, faults=Faults(late_event=0.5))


def shared(settings: SimulationSettings) -> SimulationSettings:
    """Prompts begin alike, and share their first blocks."""
    prefill = tuple(replace(shape, blocks=4 * shape.blocks) for shape in settings.prefill)
    bare = replace(kind(settings), windows=(), group_of=(), scales=(), p_first=0.0, at_once=0.0)
    return replace(bare, prefill=prefill, shared=0.8, burst=8)


def spread(settings: SimulationSettings) -> SimulationSettings:
    """Writes take their time, and their first bytes come first."""
    return replace(kind(settings), faults=Faults(write_slow=0.3, write_spread=1.0))


def whole_unread(settings: SimulationSettings) -> SimulationSettings:
    """All loads are reported outside vLLM's read."""
    return replace(whole(settings), faults=Faults(unread=1.0))


def whole(settings: SimulationSettings) -> SimulationSettings:
    """Windows and first tokens, some of which are lost or late."""
    return replace(windows(settings), p_first=0.0, at_once=0.0, first=True, first_faults=FirstFaults(0.1, 0.3))


def first(settings: SimulationSettings) -> SimulationSettings:
    """First tokens are lost, late, doubled and mixed up, prefills are dispatched twice, and clients disconnect."""
    faults = Faults(leave=0.3, preempt=0.2, double_dispatch=0.3, kill_prefill=0.02, kill_metaserver=0.02, http=0.05)
    return replace(
        settings,
        windows=(),
        group_of=(),
        scales=(),
        p_first=0.0,
        at_once=0.0,
        first=True,
        first_faults=FirstFaults(0.1, 0.3, 0.2, 0.2, 0.1),
        faults=faults,
    )
