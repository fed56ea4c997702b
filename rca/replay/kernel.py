"""The event loop: plain Python over arrays, which numba compiles as it is (`compiled`) when that pays.

Everything here is written in the subset that numba's nopython mode takes, and without arithmetic that overflows, so
that both ways of running it give identical results. There is one coroutine-like entry, `advance`: it runs until the
end or until it needs an answer from the policy, and goes on where it stopped when it is called again.

Names: p is the `Problem` (never written), s the `State`, w a workload's row, n a node's row, i a position.
"""

# mypy: disable-error-code="no-any-return"
# (Elements of arrays are Any to mypy; conversions would only slow the interpreter down.)

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from rca.replay.model import Bools, Floats, Ints

# What `advance` returns.
DONE, NEED_ORDER, NEED_PLACE, NEED_PREEMPT, NEED_SPACE = 0, 1, 2, 3, 4

# Status values of `rca.replay.model.Status`; numba needs plain integers.
_NEW, _WAITING, _RUNNING, _FINISHED, _CANCELLED, _FAILED, _UNPLACEABLE = 0, 1, 2, 3, 4, 5, 6

# Placement rules of `rca.replay.policies.base.Placement`.
_FIRST, _BEST, _DOT, _PACK, _CLUSTER, _RANDOM, _FGD, _WORST, _CUSTOM = 0, 1, 2, 3, 4, 5, 6, 7, 8

# Backfill modes, in the order of `rca.replay.model.Backfill`.
_STRICT, _EASY, _GREEDY = 0, 1, 2

# Entries of State.i.
(
    PHASE,
    HEAD,
    TAIL,
    HEAP,
    ARRIVAL,
    FAILURE,
    REQUEST,
    POINTER,
    EVENTS,
    ROWS,
    SCORES_FOR,
    ASKED_FOR,
    RECENT,
    RUNNING,
    STOPPED,
    CHANGED,
    USED_MILLI,
    USED_CPU,
    ARRIVED,
    PASSES,
    RESERVED,
    WAITING,
    TOKEN,
    INTS,
) = range(24)

# Entries of State.f.
NOW, SHADOW, ROUND, FLOATS = range(4)

#: Modulus of the multiplicative hashes: products of two residues stay below 2^62.
PRIME = 2_147_483_647
#: Nodes per block of the two-level search.
BLOCK = 32
#: Largest specification that published scores are normalised by: milli-CPU and milli-GPU of a node.
MAX_CPU, MAX_GPU = 128_000.0, 8_000.0
#: Entries of the ring of recently finished workloads.
WINDOW = 64


class Problem(NamedTuple):
    """What does not change: [N] nodes in order of preference, [W] workloads, [C] demand classes, [T] typical tasks."""

    gpus: Ints
    model_bit: Ints
    pool: Ints
    mig: Bools
    node_mix: Ints
    cpu: Ints
    memory: Ints
    submit: Floats
    duration: Floats
    estimate: Floats
    need_cpu: Ints
    need_memory: Ints
    need_gpus: Ints
    milli: Ints
    profile: Ints
    models: Ints
    pools: Ints
    pinned: Ints
    rank: Ints
    tenant: Ints
    next_member: Ints
    leader: Ints
    distinct: Bools
    preemptible: Bools
    mix: Ints
    uid: Ints
    demand: Ints
    arrivals: Ints
    arrival_time: Floats
    mig_size: Ints
    mig_starts: Ints
    failure_time: Floats
    failure_node: Ints
    failure_up: Bools
    quota: Ints
    guarantee: Floats
    rounds: Ints
    group_milli: Ints
    group_count: Ints
    group_models: Ints
    group_from: Ints
    typical_cpu: Ints
    typical_memory: Ints
    typical_share: Floats
    flags: Ints
    numbers: Floats


class State(NamedTuple):
    """What changes."""

    i: Ints
    f: Floats
    status: Ints
    start: Floats
    first_start: Floats
    end: Floats
    remaining: Floats
    node: Ints
    devices: Ints
    placeable: Bools
    slot: Ints
    preemptions: Ints
    lost: Floats
    by: Ints
    cancel: Floats
    key: Floats
    queue: Ints
    queue_key: Floats
    queue_token: Ints
    token: Ints
    heap_time: Floats
    heap_id: Ints
    free: Ints
    free_cpu: Ints
    free_memory: Ints
    mig_used: Ints
    down: Ints
    open: Bools
    whole: Ints
    best: Ints
    total: Ints
    fragmented: Floats
    affinity: Ints
    version: Ints
    block_cpu: Ints
    block_memory: Ints
    block_whole: Ints
    block_best: Ints
    first_on: Ints
    next_on: Ints
    previous_on: Ints
    running: Ints
    running_at: Ints
    failed: Bools
    rank_blocked: Bools
    tenant_blocked: Bools
    rank_used: Floats
    tenant_used: Ints
    round_at: Floats
    round_used: Ints
    requeue: Ints
    victims: Ints
    chosen: Ints
    reserved: Bools
    taken: Ints
    scores: Floats
    recent: Ints
    row: Ints
    out: Ints
    cache_score: Floats
    cache_device: Ints
    cache_version: Ints
    copy_free: Ints
    copy_cpu: Ints
    copy_memory: Ints
    copy_mig: Ints
    series: Floats


# The flags of Problem.flags and the numbers of Problem.numbers, by position.
(
    PLACEMENT,
    LEVELS,
    BACKFILL,
    PREEMPTION,
    CUSTOM_VICTIMS,
    RETRY,
    COMPACTION,
    DYNAMIC,
    FRAGMENTATION,
    SERIES,
    PER_RANK,
    CACHE,
) = range(12)
RESTART, CHECKPOINT, HORIZON, INTERVAL, CAPACITY = range(5)


# --- nodes -----------------------------------------------------------------------------------------------------------


def node_fragmentation(p: Problem, gpus: Ints, size: int, cpu: int, memory: int, model_bit: int) -> float:
    """F(n): the free milli-GPU that typical tasks cannot use; `exporters.measures.fragmentation` defines it."""
    total = 0
    for j in range(size):
        total += gpus[j]
    if total == 0:
        return 0.0
    usable = 0.0
    for g in range(len(p.group_milli)):
        milli = p.group_milli[g]
        if milli == 0 or (p.group_models[g] != 0 and p.group_models[g] & model_bit == 0):
            continue
        fitting = 0
        amount = 0
        for j in range(size):
            if gpus[j] >= milli:
                fitting += 1
                amount += gpus[j]
        if fitting < p.group_count[g]:
            continue
        share = 0.0
        for t in range(p.group_from[g], p.group_from[g + 1]):
            if cpu >= p.typical_cpu[t] and memory >= p.typical_memory[t]:
                share += p.typical_share[t]
        usable += share * amount
    return max(0.0, total - usable)


def touch(p: Problem, s: State, n: int) -> None:
    """Bring everything that is derived from node ``n`` up to date."""
    whole = 0
    best = 0
    total = 0
    for j in range(p.gpus[n]):
        left = s.free[n, j]
        total += left
        if left == 1000:
            whole += 1
        if left > best:
            best = left
    s.total[n] = total
    if p.mig[n]:
        whole = 0
        best = 0
    s.whole[n] = whole
    s.best[n] = best
    s.version[n] += 1
    if p.flags[FRAGMENTATION]:
        s.fragmented[n] = node_fragmentation(p, s.free[n], p.gpus[n], s.free_cpu[n], s.free_memory[n], p.model_bit[n])
    b = n // BLOCK
    cpu = -1
    memory = -1
    whole = -1
    best = -1
    for m in range(b * BLOCK, min(len(p.gpus), (b + 1) * BLOCK)):
        if s.down[m] == 0 and s.open[m]:
            cpu = max(cpu, s.free_cpu[m])
            memory = max(memory, s.free_memory[m])
            whole = max(whole, s.whole[m])
            best = max(best, s.best[m])
    s.block_cpu[b] = cpu
    s.block_memory[b] = memory
    s.block_whole[b] = whole
    s.block_best[b] = best


def mig_start(used: int, size: int, starts: int) -> int:
    """The first slice at which a MIG profile fits a GPU whose used slices are ``used``; -1 for none."""
    for at in range(8):
        if starts >> at & 1 and used >> at & ((1 << size) - 1) == 0:
            return at
    return -1


def allowed(p: Problem, w: int, n: int) -> bool:
    """Whether ``w`` may run on node ``n`` at all."""
    if p.pinned[w] >= 0 and p.pinned[w] != n:
        return False
    if p.pools[w] != 0 and p.pools[w] & p.pool[n] == 0:
        return False
    if p.models[w] != 0 and p.models[w] & p.model_bit[n] == 0:
        return False
    return p.profile[w] < 0 or p.mig[n]


def holds(p: Problem, w: int, n: int, cpu: int, memory: int, gpus: Ints, used: Ints) -> bool:
    """Whether ``w`` fits into the given free amounts of node ``n``."""
    if cpu < p.need_cpu[w] or memory < p.need_memory[w]:
        return False
    count = p.need_gpus[w]
    if count == 0:
        return True
    if p.profile[w] >= 0:
        for j in range(p.gpus[n]):
            if mig_start(used[j], p.mig_size[p.profile[w]], p.mig_starts[p.profile[w]]) >= 0:
                return True
        return False
    if p.mig[n]:
        return False
    milli = p.milli[w]
    for j in range(p.gpus[n]):
        if gpus[j] >= milli:
            count -= 1
            if count == 0:
                return True
    return False


def fits(p: Problem, s: State, w: int, n: int) -> bool:
    """Whether ``w`` fits node ``n`` now; the cheap tests first."""
    if s.free_cpu[n] < p.need_cpu[w] or s.free_memory[n] < p.need_memory[w]:
        return False
    count = p.need_gpus[w]
    if count > 0 and p.profile[w] < 0:
        milli = p.milli[w]
        if s.best[n] < milli or (milli == 1000 and s.whole[n] < count):
            return False
    if s.down[n] > 0 or not s.open[n] or not allowed(p, w, n):
        return False
    if count == 0 or (p.profile[w] < 0 and (p.milli[w] == 1000 or count == 1)):
        return True
    return holds(p, w, n, s.free_cpu[n], s.free_memory[n], s.free[n], s.mig_used[n])


# --- scores ----------------------------------------------------------------------------------------------------------


def level(score: float, levels: int) -> float:
    """Round a score in [0, 1] down to one of ``levels``; 0 leaves it."""
    return float(math.floor(score * levels)) if levels > 0 else score


def fgd_score(p: Problem, s: State, w: int, n: int, levels: int) -> float:
    """How much F falls if ``w`` goes to ``n``; s.out[0] is the best device of a shared GPU, -1 otherwise.

    With levels, the sigmoid of the fall in GPUs, rounded down, as the published simulator has it.
    """
    size = p.gpus[n]
    row = s.row
    for j in range(size):
        row[j] = s.free[n, j]
    cpu = s.free_cpu[n] - p.need_cpu[w]
    memory = s.free_memory[n] - p.need_memory[w]
    before = s.fragmented[n]
    s.out[0] = -1
    if p.need_gpus[w] == 1 and p.milli[w] < 1000:
        best = -math.inf
        milli = p.milli[w]
        for j in range(size):
            if row[j] >= milli:
                seen = False
                for k in range(j):
                    if row[k] == row[j]:
                        seen = True
                        break
                if seen:
                    continue
                row[j] -= milli
                after = node_fragmentation(p, row, size, cpu, memory, p.model_bit[n])
                row[j] += milli
                score = before - after
                if levels > 0:
                    score = level(1.0 / (1.0 + math.exp(-score / 1000.0)), levels)
                if score > best:
                    best = score
                    s.out[0] = j
        return best
    left = p.need_gpus[w]
    for j in range(size):
        if left > 0 and row[j] >= p.milli[w]:
            row[j] -= p.milli[w]
            left -= 1
    score = before - node_fragmentation(p, row, size, cpu, memory, p.model_bit[n])
    if levels > 0:
        score = level(1.0 / (1.0 + math.exp(-score / 1000.0)), levels)
    return score


def packing_score(p: Problem, s: State, w: int, n: int) -> float:
    """Shared GPUs first, then free GPUs of a used node, then free nodes; the published scores."""
    if p.need_gpus[w] == 0:
        return 0.0
    size = p.gpus[n]
    if s.whole[n] == size:
        return float(max(33 - size, size))
    row = s.row
    for j in range(size):
        row[j] = s.free[n, j]
    used_free = 0
    percent = 0
    for _ in range(p.need_gpus[w]):
        at = -1
        for j in range(size):
            if row[j] >= p.milli[w] and (at < 0 or row[j] < row[at]):
                at = j
        if at < 0:
            return 0.0
        if row[at] == 1000:
            used_free += 1
        percent += row[at] * 100 // 1000
        row[at] = -1
    if used_free > 0:
        return float(max(50 - used_free, 33))
    return float(max(100 - percent // 10, 50))


def clustering_score(p: Problem, s: State, w: int, n: int) -> float:
    """Same size class only, same among others, idle, others; within each, the fuller node."""
    if p.need_gpus[w] == 0:
        return 0.0
    tag = 0 if p.milli[w] < 1000 else p.need_gpus[w]
    kinds = 0
    for a in range(s.affinity.shape[1]):
        if s.affinity[n, a] > 0:
            kinds += 1
    fuller = float((25 * max(0, 8000 - s.total[n])) // 8000)
    if s.affinity[n, tag] > 0:
        return fuller + (75.0 if kinds == 1 else 50.0)
    return fuller + (25.0 if kinds == 0 else 0.0)


def node_score(p: Problem, s: State, w: int, n: int) -> float:
    """The placement rule's score of node ``n`` for ``w``; larger is better."""
    rule = p.flags[PLACEMENT]
    levels = p.flags[LEVELS]
    if rule == _CUSTOM:
        return s.scores[n]
    if rule == _RANDOM:
        return float(p.mix[w] * p.node_mix[n] % PRIME)
    if rule == _FGD:
        if not p.flags[CACHE]:
            return fgd_score(p, s, w, n, levels)
        c = p.demand[w]
        if s.cache_version[n, c] != s.version[n]:
            s.cache_score[n, c] = fgd_score(p, s, w, n, levels)
            s.cache_device[n, c] = s.out[0]
            s.cache_version[n, c] = s.version[n]
        s.out[0] = s.cache_device[n, c]
        return s.cache_score[n, c]
    if rule == _PACK:
        return packing_score(p, s, w, n)
    if rule == _CLUSTER:
        return clustering_score(p, s, w, n)
    gpu = p.need_gpus[w] * p.milli[w]
    if rule == _DOT:
        product = min(1.0, s.free_cpu[n] / MAX_CPU) * (p.need_cpu[w] / MAX_CPU)
        product += (s.total[n] / MAX_GPU) * (gpu / MAX_GPU)
        return level(1.0 - product / 2.0, levels)
    left = min(1.0, (s.free_cpu[n] - p.need_cpu[w]) / MAX_CPU) * 0.5 + (s.total[n] - gpu) / MAX_GPU * 0.5
    if rule == _WORST:
        return level(left, levels)
    return level(1.0 - left, levels)


def choose(p: Problem, s: State, w: int, avoid_reserved: bool, stamp: int) -> int:
    """The best node for ``w`` now, -1 for none; s.out[0] is FGD's device. Nodes marked ``stamp`` in s.taken are out."""
    best = -1
    best_score = -math.inf
    device = -1
    first = p.flags[PLACEMENT] == _FIRST
    plain = p.need_gpus[w] > 0 and p.profile[w] < 0
    low = 0
    high = len(p.gpus)
    if p.pinned[w] >= 0:
        low = p.pinned[w]
        high = low + 1
    n = low
    while n < high:
        b = n // BLOCK
        if n % BLOCK == 0 and (
            s.block_cpu[b] < p.need_cpu[w]
            or s.block_memory[b] < p.need_memory[w]
            or (plain and (s.block_best[b] < p.milli[w] or (p.milli[w] == 1000 and s.block_whole[b] < p.need_gpus[w])))
        ):
            n += BLOCK
            continue
        if fits(p, s, w, n) and not (avoid_reserved and s.reserved[n]) and (stamp == 0 or s.taken[n] != stamp):
            s.out[0] = -1
            score = node_score(p, s, w, n)
            if score > best_score:
                best = n
                best_score = score
                device = s.out[0]
                if first:
                    break
        n += 1
    s.out[0] = device
    return best


# --- holding resources -----------------------------------------------------------------------------------------------


def pick_devices(p: Problem, s: State, w: int, n: int, device: int) -> int:
    """Bit mask of the devices for ``w`` on ``n``; ``device`` is one chosen already, or -1. MIG's slice: s.out[1]."""
    count = p.need_gpus[w]
    if count == 0:
        return 0
    if p.profile[w] >= 0:
        # The fullest GPU that still has room, so that large profiles keep theirs.
        at = -1
        used = -1
        for j in range(p.gpus[n]):
            start = mig_start(s.mig_used[n, j], p.mig_size[p.profile[w]], p.mig_starts[p.profile[w]])
            if start >= 0 and s.mig_used[n, j] > used:
                at = j
                used = s.mig_used[n, j]
                s.out[1] = start
        return 1 << at
    if device >= 0:
        return 1 << device
    milli = p.milli[w]
    rule = p.flags[PLACEMENT]
    mask = 0
    for _ in range(count):
        at = -1
        value = 0
        for j in range(p.gpus[n]):
            left = s.free[n, j]
            if left < milli or mask >> j & 1:
                continue
            if milli == 1000 or rule == _FIRST:
                at = j
                break
            worth = -left
            if rule == _RANDOM:
                worth = p.mix[w] * (7919 * (j + 1) + p.node_mix[n] % 1_000_003) % PRIME
            elif rule == _WORST:
                worth = left
            if at < 0 or worth > value:
                at = j
                value = worth
        mask |= 1 << at
    return mask


def hold(p: Problem, s: State, w: int, n: int, mask: int) -> None:
    """Take the resources of ``w`` on ``n``."""
    s.node[w] = n
    s.devices[w] = mask
    s.free_cpu[n] -= p.need_cpu[w]
    s.free_memory[n] -= p.need_memory[w]
    for j in range(p.gpus[n]):
        if mask >> j & 1:
            s.free[n, j] -= p.milli[w]
            if p.profile[w] >= 0:
                s.slot[w] = s.out[1]
                s.mig_used[n, j] |= ((1 << p.mig_size[p.profile[w]]) - 1) << s.out[1]
    if p.need_gpus[w] > 0:
        s.affinity[n, 0 if p.milli[w] < 1000 else p.need_gpus[w]] += 1
    gpu = p.need_gpus[w] * p.milli[w]
    s.i[USED_MILLI] += gpu
    s.i[USED_CPU] += p.need_cpu[w]
    s.rank_used[min(p.rank[w], len(s.rank_used) - 1)] += gpu
    if p.tenant[w] >= 0:
        s.tenant_used[p.tenant[w]] += gpu
    s.next_on[w] = s.first_on[n]
    s.previous_on[w] = -1
    if s.first_on[n] >= 0:
        s.previous_on[s.first_on[n]] = w
    s.first_on[n] = w
    touch(p, s, n)


def free_up(p: Problem, s: State, w: int) -> None:
    """Give the resources of ``w`` back."""
    n = s.node[w]
    mask = s.devices[w]
    s.free_cpu[n] += p.need_cpu[w]
    s.free_memory[n] += p.need_memory[w]
    for j in range(p.gpus[n]):
        if mask >> j & 1:
            s.free[n, j] += p.milli[w]
            if p.profile[w] >= 0:
                s.mig_used[n, j] &= ~(((1 << p.mig_size[p.profile[w]]) - 1) << s.slot[w])
    if p.need_gpus[w] > 0:
        s.affinity[n, 0 if p.milli[w] < 1000 else p.need_gpus[w]] -= 1
    gpu = p.need_gpus[w] * p.milli[w]
    s.i[USED_MILLI] -= gpu
    s.i[USED_CPU] -= p.need_cpu[w]
    s.rank_used[min(p.rank[w], len(s.rank_used) - 1)] -= gpu
    if p.tenant[w] >= 0:
        s.tenant_used[p.tenant[w]] -= gpu
    if s.previous_on[w] >= 0:
        s.next_on[s.previous_on[w]] = s.next_on[w]
    else:
        s.first_on[n] = s.next_on[w]
    if s.next_on[w] >= 0:
        s.previous_on[s.next_on[w]] = s.previous_on[w]
    s.i[CHANGED] = 1
    touch(p, s, n)


# --- the heap of ends and cancellations ------------------------------------------------------------------------------


def heap_before(s: State, a: int, b: int) -> bool:
    if s.heap_time[a] != s.heap_time[b]:
        return s.heap_time[a] < s.heap_time[b]
    return s.heap_id[a] < s.heap_id[b]


def heap_swap(s: State, a: int, b: int) -> None:
    time = s.heap_time[a]
    s.heap_time[a] = s.heap_time[b]
    s.heap_time[b] = time
    what = s.heap_id[a]
    s.heap_id[a] = s.heap_id[b]
    s.heap_id[b] = what


def heap_down(s: State, at: int) -> None:
    size = s.i[HEAP]
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and heap_before(s, child + 1, child):
            child += 1
        if not heap_before(s, child, at):
            return
        heap_swap(s, child, at)
        at = child


def heap_valid(p: Problem, s: State, time: float, what: int) -> bool:
    """Whether an entry still stands: its workload runs until then, or waits and leaves then."""
    size = len(p.submit)
    if what < size:
        return s.status[what] == _RUNNING and s.end[what] == time
    w = what - size
    return s.status[w] == _WAITING and s.cancel[w] == time and math.isnan(s.first_start[w])


def push(p: Problem, s: State, time: float, what: int) -> None:
    if s.i[HEAP] == len(s.heap_time):
        # Full of entries that stopped workloads left behind: at most two a workload are valid.
        size = 0
        for at in range(s.i[HEAP]):
            if heap_valid(p, s, s.heap_time[at], s.heap_id[at]):
                s.heap_time[size] = s.heap_time[at]
                s.heap_id[size] = s.heap_id[at]
                size += 1
        s.i[HEAP] = size
        for at in range(size // 2 - 1, -1, -1):
            heap_down(s, at)
    at = s.i[HEAP]
    s.heap_time[at] = time
    s.heap_id[at] = what
    s.i[HEAP] += 1
    while at > 0 and heap_before(s, at, (at - 1) // 2):
        heap_swap(s, at, (at - 1) // 2)
        at = (at - 1) // 2


def pop(s: State) -> None:
    s.i[HEAP] -= 1
    last = s.i[HEAP]
    s.heap_time[0] = s.heap_time[last]
    s.heap_id[0] = s.heap_id[last]
    heap_down(s, 0)


# --- the queue -------------------------------------------------------------------------------------------------------


def before(p: Problem, s: State, w: int, at: int) -> bool:
    """Whether workload ``w`` comes before the queue's entry ``at``."""
    if s.key[w] != s.queue_key[at]:
        return s.key[w] < s.queue_key[at]
    v = s.queue[at]
    if p.submit[w] != p.submit[v]:
        return p.submit[w] < p.submit[v]
    return p.uid[w] < p.uid[v]


def move_entry(s: State, at: int, to: int) -> None:
    s.queue[to] = s.queue[at]
    s.queue_key[to] = s.queue_key[at]
    s.queue_token[to] = s.queue_token[at]


def waits(s: State, at: int) -> bool:
    """Whether the queue's entry ``at`` still stands: entries of what left are dropped later, many at once."""
    return s.queue_token[at] == s.token[s.queue[at]]


def unqueue(s: State, w: int) -> None:
    """``w`` no longer waits."""
    s.token[w] = 0
    s.i[WAITING] -= 1


def enqueue(p: Problem, s: State, w: int) -> None:
    """Put ``w`` at its place in the queue; most come last."""
    rounds = len(p.rounds)
    if rounds > 0:
        r = min(p.rank[w], rounds - 1)
        if s.round_at[r] < s.f[ROUND]:
            s.round_at[r] = s.f[ROUND]
            s.round_used[r] = 0
        if s.round_used[r] >= p.rounds[r]:
            s.round_at[r] += 1.0
            s.round_used[r] = 0
        s.round_used[r] += 1
        s.key[w] = s.round_at[r] + r / 1024.0
    if s.i[TAIL] == len(s.queue):
        drop_entries(s)
    low = s.i[HEAD]
    high = s.i[TAIL]
    if high > low and before(p, s, w, high - 1):
        while low < high:
            middle = (low + high) // 2
            if before(p, s, w, middle):
                high = middle
            else:
                low = middle + 1
        for at in range(s.i[TAIL], low, -1):
            move_entry(s, at - 1, at)
    s.i[TOKEN] += 1
    s.token[w] = s.i[TOKEN]
    s.queue[high] = w
    s.queue_key[high] = s.key[w]
    s.queue_token[high] = s.token[w]
    s.i[TAIL] += 1
    s.i[WAITING] += 1


def drop_entries(s: State) -> None:
    """Drop the entries of what left the queue, and move the rest to the beginning."""
    to = 0
    for at in range(s.i[HEAD], s.i[TAIL]):
        if waits(s, at):
            move_entry(s, at, to)
            to += 1
    s.i[HEAD] = 0
    s.i[TAIL] = to


def tidy(s: State) -> None:
    """After a pass: the head is an entry that stands, and most entries do."""
    while s.i[HEAD] < s.i[TAIL] and not waits(s, s.i[HEAD]):
        s.i[HEAD] += 1
    if s.i[TAIL] - s.i[HEAD] > 2 * s.i[WAITING] + 16:
        drop_entries(s)


# --- starting and stopping -------------------------------------------------------------------------------------------


def begin(p: Problem, s: State, w: int) -> None:
    """``w``, which holds its resources, runs from now."""
    now = s.f[NOW]
    s.status[w] = _RUNNING
    s.start[w] = now
    if math.isnan(s.first_start[w]):
        s.first_start[w] = now
    s.end[w] = now + s.remaining[w]
    if s.end[w] < math.inf:
        push(p, s, s.end[w], w)
    s.running[s.i[RUNNING]] = w
    s.running_at[w] = s.i[RUNNING]
    s.i[RUNNING] += 1
    s.i[EVENTS] += 1


def leave(p: Problem, s: State, w: int) -> None:
    """``w`` no longer runs."""
    at = s.running_at[w]
    last = s.i[RUNNING] - 1
    moved = s.running[last]
    s.running[at] = moved
    s.running_at[moved] = at
    s.i[RUNNING] = last
    free_up(p, s, w)
    s.i[EVENTS] += 1


def lost_if_stopped(p: Problem, s: State, w: int) -> float:
    """Seconds of work that would be done again if ``w`` stopped now, restart included."""
    elapsed = s.f[NOW] - s.start[w]
    interval = p.numbers[CHECKPOINT]
    lost = elapsed
    if interval == 0.0:
        lost = 0.0
    elif interval < math.inf:
        lost = elapsed - math.floor(elapsed / interval) * interval
    return lost + p.numbers[RESTART]


def stop(p: Problem, s: State, w: int, by: int) -> None:
    """Stop ``w`` and its gang; they go back to the queue when the pass is over."""
    m = p.leader[w]
    while m >= 0:
        if s.status[m] == _RUNNING:
            lost = lost_if_stopped(p, s, m)
            s.remaining[m] = max(0.0, s.remaining[m] - (s.f[NOW] - s.start[m])) + lost
            s.lost[m] += lost
            s.preemptions[m] += 1
            s.by[m] = by
            leave(p, s, m)
            s.end[m] = math.nan
            s.status[m] = _WAITING
            s.node[m] = -1
        m = p.next_member[m]
    s.requeue[s.i[STOPPED]] = p.leader[w]
    s.i[STOPPED] += 1


def within_limits(p: Problem, s: State, w: int) -> bool:
    """Whether quotas and other ranks' guarantees let ``w`` (with its gang) start; marks what they block."""
    need = 0
    m = w
    while m >= 0:
        if s.status[m] != _FINISHED:
            need += p.need_gpus[m] * p.milli[m]
        m = p.next_member[m]
    t = p.tenant[w]
    if t >= 0 and p.quota[t] >= 0 and s.tenant_used[t] + need > p.quota[t]:
        s.tenant_blocked[t] = True
        return False
    if len(p.guarantee) > 0 and need > 0:
        kept = 0.0
        r = min(p.rank[w], len(s.rank_used) - 1)
        for q in range(len(p.guarantee)):
            if q != r:
                kept += max(0.0, p.guarantee[q] - s.rank_used[q])
        # What would never fit beside the guarantees may have them when no GPU is in use.
        kept = min(kept, p.numbers[CAPACITY] - need)
        # A rank's own unused guarantee is its own to use, whatever others hold.
        own = p.guarantee[r] - s.rank_used[r] if r < len(p.guarantee) else 0.0
        if p.numbers[CAPACITY] - s.i[USED_MILLI] - need < kept and need > own:
            s.rank_blocked[r] = True
            return False
    return True


def try_start(p: Problem, s: State, w: int, avoid_reserved: bool) -> bool:
    """Start ``w`` and its gang if all of it fits."""
    stamp = 0
    if p.next_member[w] >= 0 and p.distinct[w]:
        s.out[2] += 1
        stamp = s.out[2]
    m = w
    while m >= 0:
        if s.status[m] == _FINISHED:
            m = p.next_member[m]
            continue
        n = choose(p, s, m, avoid_reserved, stamp)
        if n < 0 and p.flags[COMPACTION] and p.need_gpus[m] == 1 and p.milli[m] < 1000 and p.profile[m] < 0:
            n = compact(p, s, m)
        if n < 0:
            undo = w
            while undo != m:
                if s.status[undo] != _FINISHED:
                    changed = s.i[CHANGED]
                    free_up(p, s, undo)
                    s.i[CHANGED] = changed
                    s.node[undo] = -1
                undo = p.next_member[undo]
            return False
        hold(p, s, m, n, pick_devices(p, s, m, n, s.out[0]))
        if stamp > 0:
            s.taken[n] = stamp
        m = p.next_member[m]
    m = w
    while m >= 0:
        if s.status[m] != _FINISHED:
            begin(p, s, m)
        m = p.next_member[m]
    if len(p.rounds) > 0:
        s.f[ROUND] = max(s.f[ROUND], math.floor(s.key[w]))
    return True


def compact(p: Problem, s: State, w: int) -> int:
    """Move shares between the GPUs of one node so that ``w`` fits; -1 when no node can. First fit, largest first."""
    milli = p.milli[w]
    for n in range(len(p.gpus)):
        if (
            s.total[n] < milli
            or p.mig[n]
            or s.down[n] > 0
            or not s.open[n]
            or not allowed(p, w, n)
            or s.free_cpu[n] < p.need_cpu[w]
            or s.free_memory[n] < p.need_memory[w]
        ):
            continue
        size = p.gpus[n]
        row = s.row
        for j in range(size):
            row[j] = 1000
        # Whole GPUs stay where they are; shares of one device are repacked.
        count = 0
        v = s.first_on[n]
        while v >= 0:
            if p.need_gpus[v] == 1 and p.milli[v] < 1000:
                s.chosen[count] = v
                count += 1
            else:
                for j in range(size):
                    if s.devices[v] >> j & 1:
                        row[j] -= p.milli[v]
            v = s.next_on[v]
        s.chosen[count] = w
        count += 1
        for a in range(1, count):
            v = s.chosen[a]
            b = a
            while b > 0 and p.milli[s.chosen[b - 1]] < p.milli[v]:
                s.chosen[b] = s.chosen[b - 1]
                b -= 1
            s.chosen[b] = v
        fine = True
        for a in range(count):
            at = -1
            for j in range(size):
                if row[j] >= p.milli[s.chosen[a]]:
                    at = j
                    break
            if at < 0:
                fine = False
                break
            row[at] -= p.milli[s.chosen[a]]
            s.victims[a] = at
        if not fine:
            continue
        device = -1
        for a in range(count):
            if s.chosen[a] == w:
                device = s.victims[a]
                row[device] += milli
            else:
                s.devices[s.chosen[a]] = 1 << s.victims[a]
        for j in range(size):
            s.free[n, j] = row[j]
        touch(p, s, n)
        s.out[0] = device
        return n
    return -1


def preempt(p: Problem, s: State, w: int) -> bool:
    """Stop the less urgent workloads of one node whose loss is least so that ``w`` fits there.

    Victims of a node: the least urgent first, among them the latest started; then those that turn out not to be needed
    are spared, the most urgent first.
    """
    best = -1
    best_cost = math.inf
    best_count = 0
    for n in range(len(p.gpus)):
        if s.down[n] > 0 or not s.open[n] or not allowed(p, w, n):
            continue
        count = 0
        v = s.first_on[n]
        while v >= 0:
            if p.preemptible[v] and p.rank[v] > p.rank[w]:
                at = count
                while at > 0:
                    u = s.victims[at - 1]
                    if p.rank[u] > p.rank[v] or (
                        p.rank[u] == p.rank[v]
                        and (s.start[u] > s.start[v] or (s.start[u] == s.start[v] and p.uid[u] < p.uid[v]))
                    ):
                        break
                    s.victims[at] = u
                    at -= 1
                s.victims[at] = v
                count += 1
            v = s.next_on[v]
        if count == 0:
            continue
        cpu = s.free_cpu[n]
        memory = s.free_memory[n]
        size = p.gpus[n]
        for j in range(size):
            s.row[j] = s.free[n, j]
            s.out[8 + j] = s.mig_used[n, j]
        used = s.out[8:]
        taken = 0
        while taken < count and not holds(p, w, n, cpu, memory, s.row, used):
            v = s.victims[taken]
            cpu += p.need_cpu[v]
            memory += p.need_memory[v]
            for j in range(size):
                if s.devices[v] >> j & 1:
                    s.row[j] += p.milli[v]
                    if p.profile[v] >= 0:
                        used[j] &= ~(((1 << p.mig_size[p.profile[v]]) - 1) << s.slot[v])
            taken += 1
        if not holds(p, w, n, cpu, memory, s.row, used):
            continue
        kept = 0
        for at in range(taken - 1, -1, -1):
            v = s.victims[at]
            for j in range(size):
                if s.devices[v] >> j & 1:
                    s.row[j] -= p.milli[v]
                    if p.profile[v] >= 0:
                        used[j] |= ((1 << p.mig_size[p.profile[v]]) - 1) << s.slot[v]
            if holds(p, w, n, cpu - p.need_cpu[v], memory - p.need_memory[v], s.row, used):
                cpu -= p.need_cpu[v]
                memory -= p.need_memory[v]
                s.victims[at] = -1
                kept += 1
            else:
                for j in range(size):
                    if s.devices[v] >> j & 1:
                        s.row[j] += p.milli[v]
                        if p.profile[v] >= 0:
                            used[j] &= ~(((1 << p.mig_size[p.profile[v]]) - 1) << s.slot[v])
        cost = 0.0
        for at in range(taken):
            v = s.victims[at]
            if v >= 0:
                m = p.leader[v]
                while m >= 0:
                    cost += lost_if_stopped(p, s, m) * max(1, p.need_gpus[m] * p.milli[m])
                    m = p.next_member[m]
        if cost < best_cost or (cost == best_cost and taken - kept < best_count):
            best = n
            best_cost = cost
            best_count = 0
            for at in range(taken):
                if s.victims[at] >= 0:
                    s.chosen[best_count] = s.victims[at]
                    best_count += 1
    if best < 0:
        return False
    for at in range(best_count):
        if s.status[s.chosen[at]] == _RUNNING:
            stop(p, s, s.chosen[at], w)
    return True


def reserve(p: Problem, s: State, w: int) -> None:
    """EASY: find when ``w`` could start at the earliest by the estimates, and reserve the nodes it would get."""
    s.f[SHADOW] = math.inf
    nodes = len(p.gpus)
    for n in range(nodes):
        s.reserved[n] = False
        s.copy_cpu[n] = s.free_cpu[n]
        s.copy_memory[n] = s.free_memory[n]
        for j in range(p.gpus[n]):
            s.copy_free[n, j] = s.free[n, j]
            s.copy_mig[n, j] = s.mig_used[n, j]
    count = s.i[RUNNING]
    ends = np.empty(count, np.float64)
    for at in range(count):
        v = s.running[at]
        ends[at] = max(s.f[NOW], s.start[v] + p.estimate[v])
    order = np.argsort(ends)
    for at in range(count):
        v = s.running[order[at]]
        if ends[order[at]] == math.inf:
            return
        n = s.node[v]
        s.copy_cpu[n] += p.need_cpu[v]
        s.copy_memory[n] += p.need_memory[v]
        for j in range(p.gpus[n]):
            if s.devices[v] >> j & 1:
                s.copy_free[n, j] += p.milli[v]
                if p.profile[v] >= 0:
                    s.copy_mig[n, j] &= ~(((1 << p.mig_size[p.profile[v]]) - 1) << s.slot[v])
        if at + 1 < count and ends[order[at + 1]] == ends[order[at]]:
            continue
        if fits_copy(p, s, w):
            s.f[SHADOW] = ends[order[at]]
            return


def fits_copy(p: Problem, s: State, w: int) -> bool:
    """Whether ``w`` with its gang fits the copied free amounts; marks the nodes. The copy is left as it was."""
    if p.next_member[w] < 0:
        for n in range(len(p.gpus)):
            if (
                s.down[n] == 0
                and s.open[n]
                and allowed(p, w, n)
                and holds(p, w, n, s.copy_cpu[n], s.copy_memory[n], s.copy_free[n], s.copy_mig[n])
            ):
                s.reserved[n] = True
                return True
        return False
    cpu = s.copy_cpu.copy()
    memory = s.copy_memory.copy()
    free = s.copy_free.copy()
    for n in range(len(p.gpus)):
        s.reserved[n] = False
    m = w
    while m >= 0:
        found = s.status[m] == _FINISHED
        for n in range(len(p.gpus)):
            if found:
                break
            if s.down[n] > 0 or not s.open[n] or not allowed(p, m, n) or (p.distinct[w] and s.reserved[n]):
                continue
            if holds(p, m, n, cpu[n], memory[n], free[n], s.copy_mig[n]):
                cpu[n] -= p.need_cpu[m]
                memory[n] -= p.need_memory[m]
                left = p.need_gpus[m]
                for j in range(p.gpus[n]):
                    if left > 0 and free[n, j] >= p.milli[m]:
                        free[n, j] -= p.milli[m]
                        left -= 1
                s.reserved[n] = True
                found = True
        if not found:
            for n in range(len(p.gpus)):
                s.reserved[n] = False
            return False
        m = p.next_member[m]
    return True


# --- the loop --------------------------------------------------------------------------------------------------------


def schedule(p: Problem, s: State) -> int:
    """One pass over the queue; returns a request code, 0 when the pass is complete."""
    mode = p.flags[BACKFILL]
    while s.i[POINTER] < s.i[TAIL]:
        at = s.i[POINTER]
        w = s.queue[at]
        if not waits(s, at):
            s.i[POINTER] += 1
            continue
        r = min(p.rank[w], len(s.rank_blocked) - 1)
        if s.rank_blocked[r] or (p.tenant[w] >= 0 and s.tenant_blocked[p.tenant[w]]):
            s.i[POINTER] += 1
            continue
        c = p.demand[w]
        started = False
        limited = False
        if not s.failed[c]:
            if not within_limits(p, s, w):
                limited = True
            else:
                if p.flags[PLACEMENT] == _CUSTOM and s.i[SCORES_FOR] != w:
                    s.i[REQUEST] = w
                    return NEED_PLACE
                guarded = s.i[RESERVED] == 1 and s.f[NOW] + p.estimate[w] > s.f[SHADOW]
                started = try_start(p, s, w, guarded)
                s.i[SCORES_FOR] = -1
                if not started and not guarded:
                    s.failed[c] = True
        if not started and not limited and p.flags[PREEMPTION] and s.i[PASSES] == 0 and s.i[RESERVED] == 0:
            if p.flags[CUSTOM_VICTIMS]:
                if s.i[ASKED_FOR] != w:
                    s.i[REQUEST] = w
                    return NEED_PREEMPT
            elif p.next_member[w] < 0 and within_limits(p, s, w) and preempt(p, s, w):
                for k in range(len(s.failed)):
                    s.failed[k] = False
                # Only the node that was cleared is certain to fit, and the rule may choose another: both are right.
                if p.flags[PLACEMENT] == _CUSTOM:
                    continue
                started = try_start(p, s, w, False)
        s.i[ASKED_FOR] = -1
        if started:
            unqueue(s, w)
            s.i[POINTER] += 1
            continue
        if not p.flags[RETRY]:
            m = w
            while m >= 0:
                s.status[m] = _FAILED
                m = p.next_member[m]
            unqueue(s, w)
            s.i[POINTER] += 1
            continue
        if limited:
            s.i[POINTER] += 1
            continue
        if mode == _STRICT:
            if not p.flags[PER_RANK]:
                return 0
            s.rank_blocked[r] = True
        elif mode == _EASY and s.i[RESERVED] == 0:
            reserve(p, s, w)
            s.i[RESERVED] = 1
        s.i[POINTER] += 1
    return 0


def begin_pass(s: State) -> None:
    s.i[POINTER] = s.i[HEAD]
    s.i[RESERVED] = 0
    s.f[SHADOW] = math.inf
    for k in range(len(s.rank_blocked)):
        s.rank_blocked[k] = False
    for k in range(len(s.tenant_blocked)):
        s.tenant_blocked[k] = False
    if s.i[CHANGED]:
        for k in range(len(s.failed)):
            s.failed[k] = False
        s.i[CHANGED] = 0


def arrive(p: Problem, s: State, w: int) -> None:
    """``w`` (with its gang) is submitted now."""
    fine = True
    m = w
    while m >= 0:
        s.i[ARRIVED] += p.need_gpus[m] * p.milli[m]
        s.i[EVENTS] += 1
        fine = fine and s.placeable[m]
        m = p.next_member[m]
    m = w
    while m >= 0:
        s.status[m] = _WAITING if fine else _UNPLACEABLE
        m = p.next_member[m]
    if fine:
        enqueue(p, s, w)
        if s.cancel[w] < math.inf:
            push(p, s, s.cancel[w], len(p.submit) + w)


def fail_or_repair(p: Problem, s: State, at: int) -> None:
    n = p.failure_node[at]
    s.i[EVENTS] += 1
    if p.failure_up[at]:
        s.down[n] -= 1
        s.i[CHANGED] = 1
    else:
        s.down[n] += 1
        while s.first_on[n] >= 0:
            stop(p, s, s.first_on[n], -1)
    touch(p, s, n)


def settle(p: Problem, s: State, time: float, what: int) -> None:
    """A heap entry is due: a workload ends, or leaves the queue."""
    size = len(p.submit)
    if what < size:
        leave(p, s, what)
        s.status[what] = _FINISHED
        s.recent[s.i[RECENT] % WINDOW] = what
        s.i[RECENT] += 1
        return
    w = what - size
    unqueue(s, w)
    m = w
    while m >= 0:
        s.status[m] = _CANCELLED
        s.end[m] = time
        m = p.next_member[m]
    s.i[EVENTS] += 1


def record(p: Problem, s: State) -> None:
    row = s.i[ROWS]
    s.series[row, 0] = s.f[NOW]
    s.series[row, 1] = s.i[USED_MILLI]
    s.series[row, 2] = s.i[USED_CPU]
    s.series[row, 3] = s.i[WAITING]
    s.series[row, 4] = s.i[ARRIVED]
    total = math.nan
    if p.flags[FRAGMENTATION]:
        total = 0.0
        for n in range(len(p.gpus)):
            total += s.fragmented[n]
    s.series[row, 5] = total
    s.i[ROWS] += 1


def advance(p: Problem, s: State) -> int:
    """Run until the end (`DONE`) or until the policy must answer."""
    while True:
        if s.i[PHASE] == 0:
            if p.flags[SERIES] and s.i[ROWS] == len(s.series):
                return NEED_SPACE
            while s.i[HEAP] > 0 and not heap_valid(p, s, s.heap_time[0], s.heap_id[0]):
                pop(s)
            now = math.inf
            if s.i[HEAP] > 0:
                now = s.heap_time[0]
            if s.i[FAILURE] < len(p.failure_time):
                now = min(now, p.failure_time[s.i[FAILURE]])
            if s.i[ARRIVAL] < len(p.arrivals):
                now = min(now, p.arrival_time[s.i[ARRIVAL]])
            if now == math.inf or now > p.numbers[HORIZON]:
                return DONE
            s.f[NOW] = now
            while s.i[HEAP] > 0 and s.heap_time[0] == now:
                what = s.heap_id[0]
                pop(s)
                if heap_valid(p, s, now, what):
                    settle(p, s, now, what)
            while s.i[FAILURE] < len(p.failure_time) and p.failure_time[s.i[FAILURE]] == now:
                fail_or_repair(p, s, s.i[FAILURE])
                s.i[FAILURE] += 1
            for k in range(s.i[STOPPED]):
                enqueue(p, s, s.requeue[k])
            s.i[STOPPED] = 0
            while s.i[ARRIVAL] < len(p.arrivals) and p.arrival_time[s.i[ARRIVAL]] == now:
                arrive(p, s, p.arrivals[s.i[ARRIVAL]])
                s.i[ARRIVAL] += 1
            s.i[PASSES] = 0
            s.i[PHASE] = 1
            if p.flags[DYNAMIC] and s.i[WAITING] > 0:
                return NEED_ORDER
        if s.i[PHASE] == 1:
            begin_pass(s)
            s.i[PHASE] = 2
        code = schedule(p, s)
        if code != 0:
            return code
        tidy(s)
        if s.i[STOPPED] > 0:
            for k in range(s.i[STOPPED]):
                enqueue(p, s, s.requeue[k])
            s.i[STOPPED] = 0
            s.i[PASSES] += 1
            s.i[PHASE] = 1
            continue
        if p.flags[SERIES]:
            record(p, s)
        s.i[PHASE] = 0


def refresh(p: Problem, s: State) -> None:
    """Derive everything anew when the set of open nodes changed."""
    for n in range(len(p.gpus)):
        touch(p, s, n)


def prepare(p: Problem, s: State) -> None:
    """Begin: derive everything, and find the gangs that would not even fit the empty cluster together."""
    refresh(p, s)
    for n in range(len(p.gpus)):
        s.copy_cpu[n] = s.free_cpu[n]
        s.copy_memory[n] = s.free_memory[n]
        for j in range(p.gpus[n]):
            s.copy_free[n, j] = s.free[n, j]
    for w in range(len(p.submit)):
        if p.leader[w] == w and p.next_member[w] >= 0 and s.placeable[w]:
            s.placeable[w] = fits_copy(p, s, w)


def stop_all(p: Problem, s: State, rows: Ints, by: int) -> None:
    """Stop what the policy chose, for ``by``."""
    for at in range(len(rows)):
        if s.status[rows[at]] == _RUNNING:
            stop(p, s, rows[at], by)
    for k in range(len(s.failed)):
        s.failed[k] = False


#: In the order in which numba must compile them: what is called comes first.
_ORDER: tuple[Callable[..., Any], ...] = (
    node_fragmentation,
    touch,
    mig_start,
    allowed,
    holds,
    fits,
    level,
    fgd_score,
    packing_score,
    clustering_score,
    node_score,
    choose,
    pick_devices,
    hold,
    free_up,
    heap_before,
    heap_swap,
    heap_down,
    heap_valid,
    push,
    pop,
    before,
    move_entry,
    waits,
    unqueue,
    drop_entries,
    enqueue,
    tidy,
    begin,
    leave,
    lost_if_stopped,
    stop,
    within_limits,
    compact,
    try_start,
    preempt,
    fits_copy,
    reserve,
    schedule,
    begin_pass,
    arrive,
    fail_or_repair,
    settle,
    record,
    refresh,
    prepare,
    stop_all,
    advance,
)
#: The functions that make arrays. All others go without reference counts, which would cost more than their work: every
#: call passes a hundred arrays.
_ALLOCATING: tuple[Callable[..., Any], ...] = (fits_copy, reserve)
_compiled: dict[str, Any] = {}


def compiled() -> dict[str, Any]:
    """Return this module's functions as compiled by numba, by name; the machine code is kept on disk between runs.

    Raises:
        ImportError: numba is not installed.
    """
    if not _compiled:
        import numba

        names = dict(globals())
        for function in _ORDER:
            clone = FunctionType(function.__code__, names, function.__name__)
            options: dict[str, Any] = {"cache": True, "_nrt": function in _ALLOCATING}
            names[function.__name__] = numba.njit(**options)(clone)
        _compiled.update({function.__name__: names[function.__name__] for function in _ORDER})
    return _compiled
