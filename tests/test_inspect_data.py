"""`inspect_data` shows what training sees."""

import json

import jax
import pytest
from conftest import TINY_RUN, run
from flax import nnx

from refusion_jax.batch.batch import loss_terms
from refusion_jax.config import make_objective
from refusion_jax.config.model import model_config
from refusion_jax.config.run_config import read_config
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.training.inspection import training_batch
from refusion_jax.training.program import train_program


def test_the_batch_that_is_shown_gives_the_loss_that_was_logged(trained_run):
    """The first step's: its weights are those of the seed."""
    config = read_config(trained_run)
    tokenizer, _, batch = training_batch(config, trained_run, 0)
    mesh = make_mesh({}, jax.devices()[:1])
    shape = model_config(config, tokenizer)
    program = train_program(config, shape, mesh)
    model = nnx.merge(program.graphdef, jax.jit(program.fresh_state)().params)
    terms = loss_terms(model(batch.inputs, batch.positions, batch.visibility), batch)
    coefficients = make_objective(config, shape.mask_token_id).coefficients
    logged = json.loads((trained_run / "metrics.jsonl").read_text().splitlines()[0])
    assert logged["step"] == 1
    for name, term in terms.items():
        assert float(term) == pytest.approx(logged[f"loss_{name}"], rel=1e-5)
    assert float(sum(coefficients[n] * t for n, t in terms.items())) == pytest.approx(logged["loss"], rel=1e-5)


@pytest.mark.parametrize("objective", ["refusion", "ar", "llada"])
def test_any_system_s_row_can_be_looked_at(objective, trained_run):
    flags = [flag for flag in TINY_RUN if "steps" not in flag]
    which = ["--step=4", "--place=5", "--labels", f"--workdir={trained_run}", f"--config.objective={objective}"]
    out, _ = run("inspect_data", *flags, *which)
    assert out.startswith(f"row 5 of the batch of step 4, objective {objective}\ndocument 1 of ")
    assert "must predict" in out
    assert ("▒" in out) == (objective != "ar")
    assert ("document 2 of 2: left out by this system" in out) == (objective == "llada")  # it is padding now
    _, err = run("inspect_data", *flags, "--place=8", code=2)
    assert "--place=8: a batch holds rows 0 to 7" in err


def test_shuffled_documents_are_shown_beside_their_own_text(trained_run):
    """`block_diffusion` shuffles the documents of a row, and feeds each of them without masks as well, in the end."""
    flags = [flag for flag in TINY_RUN if "steps" not in flag]
    flags += [f"--workdir={trained_run}", "--config.objective=block_diffusion"]
    moved = 0
    for place in range(4):
        lines = run("inspect_data", *flags, f"--place={place}")[0].splitlines()
        texts, given = ([line[7:] for line in lines if line.startswith(word)] for word in ("text ", "given "))
        assert len(texts) == len(given)
        assert all(own.endswith(text) for text, own in zip(texts, given, strict=True)), lines
        moved += len(texts) > 1
    assert moved
