"""A model on a machine that computes wrongly: one bit of one gradient, in one process, always or in one call."""

import os
from pathlib import Path

import torch
from torch import Tensor

from examples.classifier import Classifier

SICK = "SICK"  # "<rank> <call> <file>": call 0 is each; otherwise it happens once, while the file is not there


class Sick(Classifier):
    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        rank, call, file = os.environ[SICK].split()
        calls = 0

        def flip(gradient: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if call != "0" and (calls != int(call) or Path(file).exists()):
                return gradient
            Path(file).touch()
            flipped = gradient.clone()
            flipped.view(torch.int32).view(-1)[-1] ^= 1
            return flipped

        if os.environ.get("RANK", "0") == rank:
            self.get_parameter("layers.0.weight").register_hook(flip)
