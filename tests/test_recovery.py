"""Steps that do not count: left out, rolled back, and given up in the end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY_RUN, run
from etils import epath
from test_checkpoints import make_state

from refusion_jax import UserError
from refusion_jax.checkpoints.directory import saved_steps
from refusion_jax.training import recovery, train_step
from refusion_jax.training.loop import Now, RollBack
from refusion_jax.training.metrics import read_metrics
from refusion_jax.training.recovery import Health, SkippedBatches


def test_rows_left_out_move_all_after_them_up_and_none_comes_twice(tmp_path):
    skipped = SkippedBatches(epath.Path(tmp_path))
    assert [skipped.batch_of(step) for step in range(4)] == [0, 1, 2, 3]
    for first, last in ((10, 14), (10, 12), (5, 8)):
        skipped.add(first, RollBack(last, ""), most=3)
    again = SkippedBatches(epath.Path(tmp_path))  # a run that was killed reads the same
    drawn = [again.batch_of(step) for step in range(30)]
    assert drawn[:5] == [0, 1, 2, 3, 4]
    assert drawn[5] == 5 + 3
    assert drawn[10] == 10 + 3 + 4 + 2
    assert len(set(drawn)) == 30
    assert drawn == sorted(drawn)


@pytest.mark.parametrize("junk", [b"\xff", b"{}", b"[1]", b'[["a", 2]]'])
def test_a_list_of_rows_that_cannot_be_read_is_never_passed_over(tmp_path, junk):
    (tmp_path / recovery.FILE).write_bytes(junk)
    with pytest.raises(UserError, match=r"left_out\.json cannot be read"):
        SkippedBatches(epath.Path(tmp_path))


def test_what_does_not_help_is_given_up_with_a_diagnosis(tmp_path):
    skipped = SkippedBatches(epath.Path(tmp_path))
    for last in (12, 13):
        skipped.add(10, RollBack(last, "step 12 does not count"), most=2)
    with pytest.raises(UserError, match="training diverged: step 9 .* 2 roll-backs to step 10"):
        skipped.add(10, RollBack(11, "step 9 does not count"), most=2)


def after(step, in_a_row=0, state=None):
    metrics = {"in_a_row": jnp.int32(in_a_row), "loss": jnp.float32(jnp.nan), "grad_norm": jnp.float32(1)}
    return Now(step, state or make_state(0), metrics, is_end=False, is_preempted=False)


@pytest.mark.parametrize("looked_at", ["late", "at once"])
def test_as_many_in_a_row_as_allowed_roll_back_at_the_same_step_however_they_are_looked_at(looked_at, capsys):
    health = Health(3)

    def train():
        for step, in_a_row in enumerate([0, 1, 0, 1, 2, 3, 4, 5], start=1):
            health.after_step(after(step, in_a_row))
            if looked_at == "at once":
                health.before_save(after(step))

    with pytest.raises(RollBack, match=r"step 6 does not count \(loss nan, gradient norm 1.*3 in a row") as failure:
        train()
    assert failure.value.step == 6
    assert "step 2 does not count" in capsys.readouterr().out


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e25], ids=str)
def test_a_state_that_must_not_be_saved_is_named(value):
    state = make_state(0)
    Health(3).before_save(after(5, state=state))
    name = next(iter(state.params))
    broken = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(value), state.params[name])
    state = state.replace(params=state.params | {name: broken})
    with pytest.raises(RollBack, match=r"step 5 left \['weight'\]"):
        Health(3).before_save(after(5, state=state))


def test_the_guard_counts_what_does_not_count():
    guard = train_step.Guard(jnp.float32(2.0), jnp.int32(50), jnp.int32(4), jnp.int32(0))
    for is_good, loss, spike_free in ((True, 2.5, True), (False, jnp.nan, False)):
        after = guard.after(jnp.asarray(is_good), jnp.float32(loss))
        assert (int(after.skipped) == 4) == spike_free
        assert (int(after.in_a_row) == 0) == spike_free
        assert np.isfinite(after.loss_mean)


@pytest.mark.thorough
def test_a_spike_is_left_out_and_several_roll_back_past_their_rows(tmp_path):
    """A limit below the mean makes every step after the first 20 a spike, whatever the rows."""
    flags = [*TINY_RUN, f"--workdir={tmp_path}", "--config.guard.spike=0.01", "--config.guard.skips=3"]
    out, err = run("train", *flags, "--config.guard.rollbacks=1", code=2)
    assert "step 21 does not count (loss " in out
    assert "debug_nans" not in out  # which would find nothing
    assert "rolling back" in out
    assert "1 roll-backs to step 20" in err
    assert saved_steps(tmp_path) == [10, 20]
    assert SkippedBatches(epath.Path(tmp_path)).windows == [(20, 23)]
    out, _ = run("train", *TINY_RUN, f"--workdir={tmp_path}")  # without the limit it goes on, past those rows
    assert "step 20 of 60" in out
    assert read_metrics(tmp_path)[-1]["step"] == 60
