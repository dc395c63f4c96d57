"""The update is AdamW's on the mean loss; what is not finite changes nothing; all it remembers is in
state()."""

import math

import pytest
import torch
from torch import Tensor, nn

from mingpt.compute import optimizer as optim
from mingpt.compute.guard import MOST_RANGES
from mingpt.compute.optimizer import Update, schedule_factor
from mingpt.config.schema import Optimizer, OwnOptimizerSection, Schedule
from tests.kits.update_kit import state_of, sums_of, update_of

ADAMW, MUON = Optimizer(lr=0.01), Optimizer(name="muon", lr=0.01)
MEAN = {"ema": 0.9}
LION, ADAFACTOR = (
    OwnOptimizerSection.model_validate({"_target_": f"examples.own_optimizer.{name}", "lr": 0.01})
    for name in ("Lion", "Adafactor")
)
CONSTANT = Schedule(kind="constant", warmup_steps=0)
COSINE = Schedule(kind="cosine", warmup_steps=3, decay_steps=10, min_ratio=0.1)


class Net(nn.Module):
    """Two matrices, two biases and a norm; returns the sum of its squared errors, and how many.

    The first matrix lies in another order in memory: torch's fused kernel walks through that, whatever the strides say.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.first.weight = nn.Parameter(self.first.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        errors = (self.last(torch.tanh(self.norm(self.first(x)))) - y).square()
        return errors.sum(), torch.tensor(float(errors.numel()))


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=g), torch.randn(8, 3, generator=g)


def update_for(
    model: nn.Module, config: Optimizer = ADAMW, schedule: Schedule = CONSTANT, fp16: bool = False
) -> Update:
    # The tokens are no power of two, and not the real count: they must cancel out.
    return update_of(model, config, schedule, tokens_per_microbatch=7, fp16=fp16)


def take(model: Net, update: Update, step: int, good: bool = True) -> Tensor:
    """One step as the trainer takes it. good: all gradients are finite."""
    loss, count = model(*batch(step))
    update.scaled(loss).backward()
    if not good and model.last.weight.grad is not None:
        model.last.weight.grad[1, 2] = math.nan
    return update(step, torch.zeros(1), count, sums_of(update))


def snapshot(model: Net, update: Update, scale: bool = False) -> dict[str, Tensor]:
    """scale: with fp16's."""
    state = model.state_dict() | state_of(update)
    return {k: v.detach().clone() for k, v in state.items() if scale or not k.startswith("loss_scale")}


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert [k for k in ours if not torch.equal(ours[k], theirs[k]) or ours[k].dtype != theirs[k].dtype] == []


# --- groups, learning rate ---


@pytest.mark.parametrize(
    ("scaling", "global_size", "expected"),
    [("none", 256, 1), ("linear", 16, 0.25), ("sqrt", 256, 2)],
)
def test_the_learning_rate_grows_with_the_batch_as_configured(scaling: str, global_size: int, expected: float) -> None:
    config = Optimizer.model_validate({"lr": 0.01, "lr_scaling": scaling, "reference_batch": 64})
    update = update_of(Net(), config, CONSTANT, global_size=global_size)
    assert update.lr(5) == pytest.approx(0.01 * expected, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # step 0, 1, warm-up's last, its end, a quarter down, half, near the end, the end, long after
        ("cosine", [0.2, 0.4, 0.8, 1, 0.2 + 0.8 * (0.5 + math.sqrt(2) / 4), 0.6, 0.219577393481938, 0.2, 0.2]),
        ("linear", [0.2, 0.4, 0.8, 1, 0.8, 0.6, 0.28, 0.2, 0.2]),
        ("wsd", [0.2, 0.4, 0.8, 1, 1, 1, 0.52, 0.2, 0.2]),
        ("constant", [0.2, 0.4, 0.8, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_schedule_warms_up_and_falls_to_its_floor(kind: str, expected: list[float]) -> None:
    wsd = {"cooldown_steps": 4} if kind == "wsd" else {}
    config = Schedule.model_validate({"kind": kind, "warmup_steps": 4, "decay_steps": 24, "min_ratio": 0.2, **wsd})
    factors = [schedule_factor(config, step) for step in (0, 1, 3, 4, 9, 14, 22, 24, 1000)]
    assert factors == pytest.approx(expected, rel=1e-12)


# --- the update ---


@pytest.mark.parametrize(("clip_norm", "fp16"), [(0.05, False), (0.05, True), (1e3, False)])
def test_the_update_is_torchs_adamw_on_the_clipped_gradient_of_the_mean_loss(clip_norm: float, fp16: bool) -> None:
    config = Optimizer(lr=0.01, beta1=0.8, beta2=0.9, weight_decay=0.2, clip_norm=clip_norm)
    model, theirs = Net(), Net()
    update = update_for(model, config, COSINE, fp16=fp16)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs.first.weight, theirs.last.weight], "weight_decay": 0.2},
            {"params": [theirs.first.bias, theirs.last.bias, *theirs.norm.parameters()], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.9),
        fused=False,
    )
    for step in range(8):
        norm = take(model, update, step)
        reference.zero_grad()
        loss, count = theirs(*batch(step))
        (loss / count).backward()
        their_norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
        assert (their_norm.item() > clip_norm) == (clip_norm < 1)  # it clips, or it does not
        for group in reference.param_groups:
            group["lr"] = 0.01 * schedule_factor(COSINE, step)
        reference.step()
        assert norm.item() == pytest.approx(their_norm.item(), rel=1e-5)
        for (name, ours), wanted in zip(model.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6, msg=name)
    assert (model.first.weight - Net().first.weight).abs().max() > 0.01  # there was a way to go


@pytest.mark.parametrize(
    ("config", "fp16"),
    [(ADAMW.model_copy(update=MEAN), False), (ADAMW, True), (MUON, False), (LION, True), (ADAFACTOR, False)],
)
def test_a_bad_step_is_as_if_it_had_not_been_and_a_loaded_state_goes_on_to_the_bit_as_the_one_saved(
    config: Optimizer, fp16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim, "GROW_AFTER", 4)  # falls due after the resume, counting steps from before it
    ours, theirs, resumed = Net(), Net(), Net()
    update, other, again = (update_for(net, config, COSINE, fp16=fp16) for net in (ours, theirs, resumed))
    for step, good in enumerate([False, True, True, False, True]):  # the very first, when there are no moments yet
        norm = take(ours, update, step, good=good)
        assert bool(torch.isfinite(norm)) == good
        if good:
            take(theirs, other, step)
    assert_same_bits(snapshot(ours, update), snapshot(theirs, other))
    resumed.load_state_dict(ours.state_dict())
    again.load({k: v.contiguous() for k, v in state_of(update).items()})  # as out of a snapshot
    for step in range(5, 9):
        assert torch.equal(take(ours, update, step), take(resumed, again, step))
        assert_same_bits(snapshot(resumed, again, scale=True), snapshot(ours, update, scale=True))


@pytest.mark.parametrize("config", [config.model_copy(update=MEAN) for config in (ADAMW, MUON, LION)])
def test_the_mean_is_that_of_a_plain_loop_no_step_knows_of_it_and_without_one_it_begins_with_the_weights(
    config: Optimizer,
) -> None:
    ours, theirs = Net(), Net()
    update, other = update_for(ours, config), update_for(theirs, config.model_copy(update={"ema": 0.0}))
    means = {f"{name}.ema": p.detach().clone() for name, p in ours.named_parameters()}
    for step, good in enumerate([False, True, True, False, True]):
        take(ours, update, step, good=good)
        take(theirs, other, step, good=good)
        if good:
            means = {f"{n}.ema": means[f"{n}.ema"] * 0.9 + p.detach() * (1 - 0.9) for n, p in ours.named_parameters()}
        state = snapshot(ours, update)
        assert_same_bits({name: state.pop(name) for name in means}, means)
        assert_same_bits(state, snapshot(theirs, other))
    update.reset()
    update.load({name: tensor.contiguous() for name, tensor in state_of(other).items()})
    state = state_of(update)
    assert_same_bits({name: state[name] for name in means}, {f"{n}.ema": p for n, p in ours.named_parameters()})


def test_the_loss_scale_halves_on_a_bad_step_and_doubles_after_enough_good_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optim, "GROW_AFTER", 3)
    model = Net()
    update = update_for(model, fp16=True)
    seen = []
    for step, good in enumerate([True, True, False, False, True, True, True, True, True, False]):
        take(model, update, step, good=good)
        state = state_of(update)
        seen.append((math.log2(state["loss_scale"].item()), state["loss_scale.finite_steps"].item()))
    assert [scale for scale, _ in seen] == [16, 16, 15, 14, 14, 14, 15, 15, 15, 14]  # three good ones in a row, bad
    assert [count for _, count in seen] == [1, 2, 0, 0, 1, 2, 0, 1, 2, 0]


def test_nothing_that_was_loaded_outlasts_a_reset() -> None:
    """A snapshot may turn out to be damaged after some of its parts were taken over."""
    update = update_for(Net(), fp16=True)
    before = {name: tensor.clone() for name, tensor in state_of(update).items()}
    dropped = torch.full((MOST_RANGES, 2), -1)
    dropped[0] = torch.tensor([3, 5])
    other = {"loss_scale": torch.tensor(4.0), "loss_scale.finite_steps": torch.tensor(7.0), "health.dropped": dropped}
    update.load({name: tensor + 1 for name, tensor in before.items()} | other)
    assert update.guard.dropped == ((3, 5),)
    update.reset()
    assert_same_bits(state_of(update), before)
