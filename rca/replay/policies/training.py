"""Train the learned policy (P8): advantage actor-critic on synthetic schedules. Needs the extra ``train``.

The action is the weight vector of the workloads' features, drawn around the actor's mean with σ = 0.15; γ is 0.95, the
learning rate 3e-4. The reward of an interval adds throughput, latency and SLA. What a decision starts shows only when
it ends, so the outcome of what was started is credited to the decision that started it, with factor 0.7.

How busy a schedule happens to be moves the reward far more than any weight does. So each schedule is also replayed with
the actor's mean, the same arrivals and durations, and the difference is what is learnt from; a draw is kept for a whole
schedule, because one interval with other weights hardly changes anything.

Run as ``python -m rca.replay.policies.training --out actor.npz``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from rca.replay.engine import replay
from rca.replay.model import Backfill, Cluster, Engine, Floats, Ints, Options, Result, Trace, Workloads
from rca.replay.policies.base import Policy, View
from rca.replay.policies.learned import FEATURES, INTERVAL, STATE_SIZE, features_of, state_of

GAMMA: Final = 0.95
LEARNING_RATE: Final = 3e-4
SIGMA: Final = 0.15
DELAYED: Final = 0.7
HIDDEN: Final = 16
BATCH: Final = 16
#: Where the actor starts: rank, urgency, waiting, shortness, smallness, business.
START: Final = (0.5, 0.2, 0.2, 0.2, 0.0, 0.0)


def synthetic(seed: int, workloads: int = 400) -> Trace:
    """A small mixed cluster under bursts: urgent inference, normal and background training, with SLAs."""
    rng = np.random.default_rng(seed)
    cluster = Cluster.of([8] * 4 + [4] * 4, cpu_milli=[96_000] * 8, memory_mib=[786_432] * 8)
    rank = rng.choice(3, workloads, p=[0.4, 0.35, 0.25])
    duration = rng.lognormal(np.array([4.0, 6.0, 7.0])[rank], 0.8)
    share = rng.random(workloads) < np.array([0.6, 0.2, 0.1])[rank]
    count = np.where(share, 1, rng.choice([1, 2, 4, 8], workloads, p=[0.6, 0.2, 0.12, 0.08]))
    milli = np.where(share, rng.integers(1, 10, workloads) * 100, 1000)
    load = rng.uniform(0.8, 1.3)
    mean_gap = float((duration * count * milli).mean()) / (cluster.capacity_milli * load)
    gaps = rng.exponential(mean_gap, workloads) * rng.choice([0.3, 1.7], workloads)
    return Trace(
        cluster,
        Workloads.of(
            np.cumsum(gaps),
            duration,
            gpu_count=count,
            gpu_milli=milli,
            cpu_milli=rng.integers(1, 9, workloads) * 1000,
            memory_mib=rng.integers(4, 65, workloads) * 1024,
            rank=rank,
            estimate=duration * rng.uniform(1.0, 1.6, workloads),
            wait_slo=np.array([60.0, 900.0, 7200.0])[rank],
            business=np.array([5.0, 3.0, 1.0])[rank],
        ),
        name=f"synthetic {seed}",
    )


class _Explorer(Policy):
    """Adds one draw to the actor's mean and remembers what it saw and did."""

    name = "explorer"
    interval = INTERVAL

    def __init__(self, mean: Callable[[Floats], Floats], noise: Floats) -> None:
        self.mean = mean
        self.noise = noise
        self.times: list[float] = []
        self.states: list[Floats] = []
        self.actions: list[Floats] = []

    def order(self, view: View, rows: Ints) -> Floats:
        state = state_of(view)
        action = self.mean(state) + self.noise
        self.times.append(view.now)
        self.states.append(state)
        self.actions.append(action)
        keys: Floats = -(features_of(view, rows) @ action)
        return keys


def rewards(result: Result, times: Floats) -> Floats:
    """Reward of each decision, [D]: at once what ended in its interval, later what it had started, times 0.7.

    Of one workload: 1 for being done, less its wait in SLOs (at most 1), less 1 if it missed the SLO; weighted by its
    business value from 0.2 to 1.
    """
    work = result.trace.workloads
    done = np.flatnonzero(np.isfinite(result.end) & result.started)
    wait = result.wait[done]
    slo = work.wait_slo[done]
    worth = (1.0 - np.minimum(1.0, wait / slo) - (wait > slo)) * work.business[done] / 5.0
    ended = np.maximum(0, np.searchsorted(times, result.end[done], side="right") - 1)
    began = np.maximum(0, np.searchsorted(times, result.first_start[done], side="right") - 1)
    total = np.zeros(len(times))
    np.add.at(total, ended, worth)
    np.add.at(total, began, DELAYED * worth)
    return total


def train(episodes: int = 1600, seed: int = 0, report: Callable[[str], None] = print) -> dict[str, Floats]:
    """Train and return the actor's arrays. The same arguments give the same arrays on one machine."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    actor = nn.Sequential(nn.Linear(STATE_SIZE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, FEATURES)).double()
    critic = nn.Sequential(nn.Linear(STATE_SIZE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()
    with torch.no_grad():
        actor[2].weight.mul_(0.1)
        actor[2].bias.copy_(torch.tensor(START, dtype=torch.float64))
    optimiser = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LEARNING_RATE)

    def mean(state: Floats) -> Floats:
        with torch.no_grad():
            found: Floats = actor(torch.from_numpy(state)).numpy()
        return found

    options = Options(backfill=Backfill.GREEDY, series=False, engine=Engine.AUTO)
    history = []
    for episode in range(episodes):
        trace = synthetic(seed * 1_000_003 + episode)
        noise = SIGMA * np.random.default_rng([seed, episode]).standard_normal(FEATURES)
        explorer = _Explorer(mean, noise)
        result = replay(trace, explorer, options)
        times = np.array(explorer.times)
        usual = rewards(replay(trace, _Explorer(mean, np.zeros(FEATURES)), options), times)
        reward = rewards(result, times) - usual
        history.append(float(usual.sum()))
        returns = np.zeros(len(reward))
        running = 0.0
        for at in range(len(reward) - 1, -1, -1):
            running = reward[at] + GAMMA * running
            returns[at] = running
        states = torch.from_numpy(np.array(explorer.states))
        actions = torch.from_numpy(np.array(explorer.actions))
        goals = torch.from_numpy(returns)
        # Small batches: at this learning rate one step an episode would hardly move the weights.
        for rows in torch.randperm(len(goals)).split(BATCH):
            value = critic(states[rows])[:, 0]
            advantage = (goals[rows] - value.detach()) / (goals.std() + 1e-6)
            log_probability = -((actions[rows] - actor(states[rows])) ** 2).sum(dim=1) / (2 * SIGMA**2)
            loss = -(log_probability * advantage).mean() + 0.5 * ((goals[rows] - value) ** 2).mean()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
            optimiser.step()
        if (episode + 1) % 200 == 0:
            report(f"episode {episode + 1}: mean reward of the last 200 {np.mean(history[-200:]):.1f}")
    return {
        "w1": actor[0].weight.detach().numpy(),
        "b1": actor[0].bias.detach().numpy(),
        "w2": actor[2].weight.detach().numpy(),
        "b2": actor[2].bias.detach().numpy(),
    }


def main() -> None:
    """Train and write the weights."""
    parser = argparse.ArgumentParser(description="Train the learned replay policy.")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .npz")
    parser.add_argument("--episodes", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arrays = train(arguments.episodes, arguments.seed)
    columns: dict[str, Any] = {name: values.astype(np.float32) for name, values in arrays.items()}
    np.savez(arguments.out, **columns)


if __name__ == "__main__":
    main()
