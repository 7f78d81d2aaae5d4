"""How systems are found: in their folder, or registered from outside; and what is said of one that is not whole."""

import dataclasses
import re
import sys

import jax
import pytest
from conftest import MASK, PROMPTS, ROOT, config_with, run, settings, sharp_model
from helpers import config_of_mine
from test_systems import ROWS

from refusion_jax import UserError, decode
from refusion_jax.cli.settings import setting
from refusion_jax.config import default_config, make_objective
from refusion_jax.decoding import queue
from refusion_jax.decoding.settings import Settings
from refusion_jax.systems import ar, llada, registry
from refusion_jax.systems.interface import System


@pytest.fixture(autouse=True)
def _registered_for_the_test_alone(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A further folder of systems: files written there are found."""
    monkeypatch.setattr(registry.folder, "__path__", [*registry.folder.__path__, str(tmp_path)])
    registry.found_everywhere.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    registry.found_everywhere.cache_clear()
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"refusion_jax.systems.{path.stem}", None)


def copy_of_llada(name: str) -> str:
    """Source of a system of another name."""
    source = (ROOT / "refusion_jax" / "systems" / "llada.py").read_text()
    for own in ('name="llada"', '{"llada": Denoise}', '{"llada": reference}'):
        source = source.replace(own, own.replace("llada", name))
    return source


DATACLASS = "@dataclasses.dataclass(frozen=True)\nclass "


@pytest.mark.parametrize(
    ("part", "instead", "why"),
    [
        ("import dataclasses", "import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ('name="odd"', 'name="ar"', "UserError: system 'ar': 'ar' has this name or one of its decoders' already"),
        ("def corrupt(", "def corupt(", "UserError: .*its objective has no corrupt"),
        ('{"odd": reference}', "{}", "UserError: .*its decoder 'odd' has no reference"),
        ('"odd",', '"odd", is_default=True,', "UserError: .*'refusion' is the default"),
        ("=MaskedDiffusion,", "=MaskedDiffusion(0),", "UserError: .*no base class Objec"),
        ('name="odd"', 'name="o.d"', "UserError: .*section has no name of letters"),
        ("padding: float", "more: float\n    padding: float", "TypeError: .*'more'"),
        ("steps: int", "width: int", "UserError: .*its --decode.width has no name"),
        ("steps: int = setting(0,", "steps: int = setting(None,", "UserError: .*its --decode.steps has no default"),
        ("steps: int = setting(0,", "steps: tuple = setting((0, 1),", "UserError: .*steps has no"),
        (f"{DATACLASS}MaskedDiff", "class MaskedDiff", "UserError: .*its objective has no decorator @dataclass"),
        (f"{DATACLASS}DiffusionS", "class DiffusionS", "UserError: .*class of its decoder 'odd' has no decorator"),
    ],
)
def test_a_system_that_is_not_whole_is_named_and_breaks_no_other(folder, capsys, part, instead, why):
    before = list(registry.systems())
    registry.found_everywhere.cache_clear()
    (folder / "broken.py").write_text(copy_of_llada("odd").replace(part, instead, 1))
    (folder / "copied.py").write_text(copy_of_llada("copied"))
    assert set(registry.systems()) == {*before, "copied"}
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"{re.escape(str(folder))}/broken.py is left out: {why}.*", line)


def test_a_decoder_of_models_that_no_system_trains_is_told_of(folder, capsys):
    registry.found_everywhere.cache_clear()
    (folder / "odd.py").write_text(copy_of_llada("odd").replace('("r2ft",)', '("r2ft", "lada", "plain")'))
    assert "odd" in registry.systems()
    assert capsys.readouterr().err == "system 'odd': decodes='lada' is not a system\n"


def like_llada(name: str, **own) -> System:
    """A system of another name, with a decoder of its own."""
    usual = {"decoders": {name: type("Toy", (llada.Denoise,), {})}, "references": {name: llada.reference}}
    return dataclasses.replace(llada.SYSTEM, name=name, **{"section": name} | usual | own)


def test_a_new_system_is_found_by_its_name_and_trains_and_decodes(monkeypatch):
    """Registered from outside: no file of the package knows it."""
    toy = registry.register(like_llada("toy"))
    config = config_with(objective="toy", **{"toy.padding": 0.5})
    assert make_objective(config, MASK).padding == 0.5

    def refuse(self, **_):
        raise KeyError("no such padding")

    with monkeypatch.context() as patch:
        patch.setattr(toy.objective, "__init__", refuse)
        with pytest.raises(UserError, match="--config.toy: KeyError: 'no such padding'"):
            make_objective(config, MASK)
    model = sharp_model()
    assert decode(model, PROMPTS, settings("toy")) == decode(model, PROMPTS, settings("llada"))
    again = registry.register(like_llada("toy"))  # as when a cell of a notebook is run again
    assert registry.find_decoder("toy") is again.decoders["toy"]
    odd = dataclasses.make_dataclass(
        "Odd", [("block_length", float, setting(0.5, "A share"))], bases=(Settings,), frozen=True
    )
    with pytest.raises(UserError, match="its --decode.block_length is of type float, and that of '.*' of type int"):
        registry.register(like_llada("other", decoders={"other": type("Other", (llada.Denoise,), {"settings": odd})}))
    registry.register(like_llada("other", section="model", decoders={}))
    with pytest.raises(UserError, match="system 'other': 'model', .*, is the name of a shared key"):
        default_config()
    monkeypatch.undo()
    with pytest.raises(UserError, match="method=toy: unknown; known: "):
        settings("toy")


def test_two_systems_that_decode_each_others_models_are_registered_one_of_them_twice():
    first, second = like_llada("first", decodes=("second",)), like_llada("second", decodes=("first",))
    with pytest.raises(UserError, match="system 'first': decodes='second' is not a system"):
        registry.register(first)
    for system in (dataclasses.replace(first, decodes=()), second, first):
        registry.register(system)
    assert registry.decoders_for("first") == ["first", "second"]
    assert registry.decoders_for("second") == ["second", "first"]
    with pytest.raises(UserError, match="objective=third: no file in .* and no entry point has this system"):
        registry.default_decoder("third")


def test_a_batch_that_does_not_fit_is_refused_before_the_run_has_a_directory(tmp_path):
    wrong = 'registry.find_system("mine").objective.corrupt = lambda *_: {}\n'
    (tmp_path / "mine.py").write_text(config_of_mine("ar") + wrong)
    flags = [f"--config={tmp_path}/mine.py", "--config.objective=mine", "--config.data.examples=500"]
    _, err = run("train", *flags, f"--workdir={tmp_path}/run", code=2)
    assert re.search("^error: .*corrupt: returns dict, not a Batch", err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda batch: {"labels": batch.labels[:, 1:]}, r"batch.labels is int32\[2, 23\], and .* be int32\[2, 24\]"),
        (lambda batch: {"weights": {"md": batch.weights["mdm"]}}, r"batch.weights\['md'\] is .* should be missing"),
        (lambda batch: {"diagnostics": {"at": batch.labels[0]}}, r"batch.diagnostics\['at'\] is int32\[24\], and"),
        (lambda batch: {"visibility": jax.tree.map(lambda x: x[0], batch.visibility)}, r"batch.visibility.* int32\[24"),
        (lambda _: {"visibility": None}, "batch.visibility.group is missing, and should be int32"),
        (lambda _: {"weights": {"mdm": 1.0}}, r"batch.weights\['mdm'\] is float32\[\], and"),
        (lambda batch: {"weights": half(batch.weights)}, r"batch.weights\['mdm'\] is bfloat16\[2, 24\], and"),
        (lambda _: {"combine": lambda ce, _: {"mdm": ce.sum(axis=1)}}, r"combine .*\[2\]'}, not {'mdm': 'float32\["),
        (lambda _: {"combine": lambda ce, _: {"md": ce.sum()}}, r"combine returns {'md': 'float32\[\]'}, not {'mdm"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_the_name_of_its_objective(change, why):
    class Odd(llada.MaskedDiffusion):
        def corrupt(self, rows, keys):
            batch = super().corrupt(rows, keys)
            for field, value in change(batch).items():
                object.__setattr__(batch, field, value)  # which no type checker of the tests looks at
            return batch

    with pytest.raises(UserError, match=f"Odd.corrupt: {why}"):
        Odd(MASK).batch(ROWS, jax.random.split(jax.random.key(0), 2))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda before, after: after.replace(active=before.active),
            "Odd.step: does not end: an answer has taken [0-9]+ f",
        ),
        # The third token is always taken back; one more is committed in each pass, although the record is full.
        (lambda _, after: counted(after, after.record.count % 3), "Odd.step: does not end"),
        (lambda before, after: counted(after.replace(active=before.active), before.record.count + 1), "does not end"),
        (lambda _, s: s.replace(settings=half(s.settings)), "Odd.step: state.settings.[a-z_]* was .*, and is bfloat16"),
        (lambda _, after: (after, 1), "returns tuple, not a state"),
        (lambda _, after: move(after, positions=50), "decoder 'odd' commits .* should not decode"),
        (lambda _, after: move(after, tokens=-1000), "decoder 'odd' commits .* not a token"),
        (None, "Odd.init: returns NoneType, not a RowState"),
    ],
)
def test_a_decoder_whose_states_are_wrong_is_refused_by_its_name(change, why, monkeypatch):
    class Odd(ar.LeftToRight):
        def init(self, *given):
            return super().init(*given) if change else None

        def step(self, model, state):
            return change(state, super().step(model, state))

    registry.register(System("odd", None, {"odd": Odd}, {"odd": ar.reference}))
    monkeypatch.setattr(queue, "_FORWARDS", 16)
    with pytest.raises(UserError, match=why):
        decode(sharp_model(), PROMPTS[:2], settings("odd"))


def half(tree):
    return jax.tree.map(lambda x: x.astype("bfloat16"), tree)


def counted(state, count):
    """The state with another number of committed tokens."""
    return state.replace(record=state.record.replace(count=count))


def move(state, **by):
    """The state with other positions or tokens of what is committed."""
    moved = {name: getattr(state.record, name) + n for name, n in by.items()}
    return state.replace(record=state.record.replace(**moved))
