"""What the training loop says and does when a loss is not finite."""

from __future__ import annotations

import pytest

from hmt_deepspeed.train.loop import Progress, TrainingLoop


def loop_at(loss: float) -> TrainingLoop:
    loop = object.__new__(TrainingLoop)
    loop.progress, loop.skipped_steps = Progress(step=7, loss=loss), 2
    return loop


def test_a_finite_loss_passes_whether_or_not_its_step_was_skipped() -> None:
    for skipped in (2, 3):
        loop_at(1.5).check_loss(skipped)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_skipped_step_is_said_and_training_goes_on(
    loss: float, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = loop_at(loss)
    loop.check_loss(3)
    assert capsys.readouterr().out == f"step 7: the loss is {loss}; the step was skipped\n"
    with pytest.raises(ValueError, match=r"step 7: the loss is .* weights have been updated"):
        loop.check_loss(3)  # this one was not
