"""A schedule of your own: `schedule._target_=examples.own_schedule.one_minus_sqrt` (Hägele et al. 2024).

A schedule is a function of the step, counted from 0, which gives the learning rate as a share of optimizer.lr.
"""

import math


def one_minus_sqrt(step: int, warmup_steps: int, decay_steps: int, min_ratio: float, cooldown: float = 0.2) -> float:
    """Warm-up, then the peak, and in the last part down as 1 - sqrt(x): the loss falls lower than in a straight line.

    warmup_steps, decay_steps and min_ratio are keys of every schedule. cooldown: that part, as a share of decay_steps.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    length = max(1, round(cooldown * decay_steps))
    done = min(1.0, max(0, step - (decay_steps - length)) / length)
    return min_ratio + (1 - min_ratio) * (1 - math.sqrt(done))
