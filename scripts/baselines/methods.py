"""The searches of the founding literature, over plans as choices by number.

- `metropolis`: Markov chains that change one decision at a time, and take a change that costs more
  with the probability exp(-(ln cost' - ln cost) / T) (Metropolis et al. 1953; FlexFlow, Jia et al.
  2019), T falling from `HOT` to `COLD` (Kirkpatrick et al. 1983).
- `restarts`: hill climbing by the same changes from random plans, again and again.
- `reinforce`: a policy of one softmax for each decision, by REINFORCE (Williams 1992) with a moving
  average as the baseline, as placements were learned first (Mirhoseini et al. 2017); the reward of
  a plan is the negative logarithm of its cost.

Each runs until a number of CPU seconds is over, and gives the best plans that it came by, with the
seconds at which it did.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from scripts.baselines.space import Choices, PlanSpace

HOT, COLD = 0.3, 0.003  # of the logarithm of a cost
CHAINS = 4  # that share the time
PATIENCE = 200  # changes without a gain, after which a climb starts again
SAMPLES = 16  # plans for each change of the policy
RATE = 0.5
ENTROPY = 0.01
KEPT = 0.9  # of the moving average
ILLEGAL = 100.0  # times the cost of a first plan is that of choices which are none


@dataclass(slots=True)
class Run:
    """A search under way: its space, random numbers, and what it found: (CPU seconds, cost, plan),
    each better than the one before."""

    space: PlanSpace
    rng: np.random.Generator
    limit_s: float
    began: float = field(default_factory=time.process_time)
    found: list[tuple[float, float, Choices]] = field(default_factory=list)
    tried: int = 0

    @property
    def spent_s(self) -> float:
        return time.process_time() - self.began

    @property
    def over(self) -> bool:
        return self.spent_s >= self.limit_s

    def cost_s(self, choices: Choices) -> float:
        self.tried += 1
        cost, fits = self.space.cost(choices)
        if fits and cost < self.best_s:
            # a try that began in time counts, also where it ends later
            self.found.append((min(self.spent_s, self.limit_s), cost, choices))
        return cost

    @property
    def best_s(self) -> float:
        return self.found[-1][1] if self.found else math.inf

    def drawn(self) -> Choices:
        """Random choices; of decisions about one stage most are the plainest."""
        return tuple(
            int(self.rng.integers(len(d.values)))
            if " " not in d.name or self.rng.random() < 0.1
            else 0
            for d in self.space.decisions
        )

    def legal(self) -> Choices:
        """Random choices that are a plan."""
        while True:
            choices = self.drawn()
            if self.cost_s(choices) < math.inf or self.over:
                return choices

    def changed(self, choices: Choices) -> Choices:
        """Another value for one decision, every other time the next one or the one before."""
        open_to = [k for k, d in enumerate(self.space.decisions) if len(d.values) > 1]
        k = int(self.rng.choice(open_to))
        count, value = len(self.space.decisions[k].values), choices[k]
        if self.rng.random() < 0.5:
            value = (value + int(self.rng.choice((-1, 1)))) % count
        else:
            value = (value + 1 + int(self.rng.integers(count - 1))) % count
        return (*choices[:k], value, *choices[k + 1 :])


def metropolis(run: Run) -> None:
    each_s = run.limit_s / CHAINS
    for chain in range(CHAINS):
        at = run.legal()
        cost = run.cost_s(at)
        while (part := (run.spent_s - chain * each_s) / each_s) < 1 and not run.over:
            temperature = HOT * (COLD / HOT) ** max(part, 0.0)
            other = run.changed(at)
            other_cost = run.cost_s(other)
            if other_cost == math.inf:
                continue
            worse = math.log(other_cost / cost) if cost < math.inf else 0.0
            if worse <= 0 or run.rng.random() < math.exp(-worse / temperature):
                at, cost = other, other_cost


def restarts(run: Run) -> None:
    while not run.over:
        at, failed = run.legal(), 0
        cost = run.cost_s(at)
        while failed < PATIENCE and not run.over:
            other = run.changed(at)
            other_cost = run.cost_s(other)
            failed += 1
            if other_cost < cost:
                at, cost, failed = other, other_cost, 0


def reinforce(run: Run) -> None:
    sizes = [len(d.values) for d in run.space.decisions]
    logits = [np.zeros(size) for size in sizes]
    dearest = ILLEGAL * run.cost_s(run.legal())
    average: float | None = None
    while not run.over:
        policy = [_softmax(own) for own in logits]
        drawn = [tuple(int(run.rng.choice(len(p), p=p)) for p in policy) for _ in range(SAMPLES)]
        rewards = [-math.log(min(run.cost_s(choices), dearest)) for choices in drawn]
        mean = sum(rewards) / SAMPLES
        average = mean if average is None else KEPT * average + (1 - KEPT) * mean
        for k, p in enumerate(policy):
            chosen = np.eye(sizes[k])[[choices[k] for choices in drawn]]
            gain = (np.array(rewards) - average) @ (chosen - p) / SAMPLES
            spread = -p * (np.log(p + 1e-12) + _entropy(p))  # gradient of the entropy
            logits[k] = logits[k] + RATE * (gain + ENTROPY * spread)


def _softmax(logits: np.ndarray) -> np.ndarray:
    found = np.exp(logits - logits.max())
    return found / found.sum()


def _entropy(p: np.ndarray) -> float:
    return float(-(p * np.log(p + 1e-12)).sum())


METHODS: Mapping[str, Callable[[Run], None]] = {
    "Metropolis": metropolis,
    "restarts": restarts,
    "REINFORCE": reinforce,
}
