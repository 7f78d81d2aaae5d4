"""DFlash: its rows, and what does not fit together. What drafters learn and draft is in test_speculation.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MASK, PROMPTS, ROOT, config_with, run, settings, tiny_config, tiny_model
from flax import nnx
from helpers import drawn_matrix

from refusion_jax import UserError, decode
from refusion_jax.batch.rows import Rows
from refusion_jax.checkpoints.load import check_fits, choose_method
from refusion_jax.checkpoints.run_directory import write_model_config
from refusion_jax.checkpoints.weights import save_params
from refusion_jax.decoding.auxiliary import with_auxiliaries
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.model.shape import READ_ALIKE
from refusion_jax.systems import dflash
from refusion_jax.systems.registry import decoders_for
from refusion_jax.training.program import train_program


def test_the_row_of_the_docstring_is_fed_seen_and_labelled_as_drawn():
    rows = Rows(jnp.array([[7, 8, 9, 10]]), jnp.ones((1, 4), jnp.int32), jnp.array([[0, 1, 1, 1]]) > 0)
    batch = jax.jit(dflash.DraftBlocks(MASK, draft_length=2).corrupt)(rows, jax.random.split(jax.random.key(0), 1))
    np.testing.assert_array_equal(batch.visibility.mask()[0], drawn_matrix(dflash.__doc__, 8))
    assert batch.inputs[0].tolist() == [7, MASK, 9, MASK, 7, 8, 9, 10]
    assert batch.labels[0, :3].tolist() == [8, 9, 10]
    np.testing.assert_allclose(batch.weights["mdm"][0], [1 / 3] * 3 + [0] * 5)


def test_what_does_not_fit_together_is_refused(tmp_path):
    with pytest.raises(UserError, match="dflash.reads=: name the run or model that is read"):
        train_program(config_with(objective="dflash"), tiny_config(), make_mesh({}, jax.devices()[:1]))
    with pytest.raises(UserError, match="--decode.drafter reads another model, whose hidden_size is 32, not 16"):
        decode(with_auxiliaries(tiny_model(), drafter=tiny_model(hidden_size=32)), PROMPTS, settings("dflash"))
    save_params(tmp_path, nnx.to_pure_dict(nnx.state(tiny_model())))
    write_model_config(tmp_path, tiny_config())
    with pytest.raises(UserError, match="--config.model.head_dim=4: .* has 8"):
        check_fits(tmp_path, tiny_config(head_dim=4), None, "dflash.reads", READ_ALIKE)
    (tmp_path / "config.json").write_text('{"objective": "dflash"}')
    with pytest.raises(UserError, match="objective=dflash: its models do not decode by themselves"):
        choose_method(tmp_path, None)
    assert "dflash" in decoders_for("ar")
    (tmp_path / "config.json").write_text('{"objective": "llada"}')
    flags = ["--config.objective=dflash", f"--config.dflash.reads={tmp_path}", f"--workdir={tmp_path / 'drafter'}"]
    _, err = run("train", f"--config={ROOT / 'configs/quickstart.py'}", *flags, code=2)
    assert re.search("^error: --config.dflash.reads: method=dflash: .* was trained with objective=llada, which", err)
