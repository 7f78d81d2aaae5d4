"""Tokenizers of Hugging Face: special tokens in prompts, and which token is the mask."""

import json

import jax.numpy as jnp
import pytest
from etils import epath
from helpers import write_tokenizer

from refusion_jax import DecodeSettings, UserError
from refusion_jax.config import default_config
from refusion_jax.config.model import model_config
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.decoding.sampling import mask_logits
from refusion_jax.decoding.settings import TokenIds
from refusion_jax.model.shape import ModelConfig

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "{{ bos_token if loop.first }}[{{ m.role }}]{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}"
)
BOS, EOS = "<|im_start|>", "<|im_end|>"


def load(directory, mask="<mask>", **config):
    path = write_tokenizer(directory, **config)
    return load_tokenizer_file(path, mask)


def test_a_template_writes_the_special_tokens_that_the_tokenizer_names(tmp_path):
    tokenizer = load(tmp_path, chat_template=TEMPLATE, bos_token={"content": BOS}, eos_token=EOS)
    turns = (("user", "hi"), ("assistant", "yo"), ("user", "so"))
    (ids,) = tokenizer.encode_prompts([turns])
    assert tokenizer.render_chat([{"role": r, "content": c} for r, c in turns]) == (
        f"{BOS}[user]hi[assistant]yo{EOS}[user]so"
    )
    assert (ids[0], ids.count(tokenizer.bos_id), ids.count(tokenizer.eos_id)) == (tokenizer.bos_id, 1, 1)


def test_chats_are_rendered_with_and_without_thinking_and_with_the_beginning_of_an_answer(tmp_path):
    tokenizer, turns = load(tmp_path), [{"role": "user", "content": "hi"}]
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(turns, thinking=True) == asked
    assert tokenizer.render_chat(turns, thinking=False) == asked + "<think>\n\n</think>\n\n"
    begun = [*turns, {"role": "assistant", "content": "```python\n"}]
    text = tokenizer.render_chat(begun, thinking=True, answer_begun=True)
    assert text == asked + "```python\n"
    assert tokenizer.encode_chat([text])[0][0] == tokenizer.encode_chat([BOS])[0][0]  # the mark, not its letters


def test_an_eos_that_is_also_the_padding_can_still_be_written(tmp_path):
    assert load(tmp_path, eos_token=EOS, pad_token=BOS).pad_id >= 0
    tokenizer = load(tmp_path, eos_token=EOS, pad_token=EOS)
    assert _may_be_written(model_config(default_config(), tokenizer), tokenizer.eos_id)


def _may_be_written(model: ModelConfig, token: int) -> bool:
    """Whether decoders may choose a token at the end of an answer."""
    ids = TokenIds.of(DecodeSettings("ar"), model)
    logits = jnp.zeros((1, 1, model.vocab_size))
    return bool(jnp.isfinite(mask_logits(logits, jnp.ones((1, 1), bool), ids)[1][0, 0, token]))


def test_the_mask_token_is_the_one_that_is_named(tmp_path):
    plain = load(tmp_path)
    own = plain.encode(["number"])[0][0]
    (tmp_path / "tokenizer.json").write_bytes(plain.files["tokenizer.json"])
    piece = next(
        piece for piece, at in json.loads(plain.files["tokenizer.json"])["model"]["vocab"].items() if at == own
    )
    file = epath.Path(tmp_path / "tokenizer.json")
    assert load_tokenizer_file(file, piece).mask_id == load_tokenizer_file(file, own).mask_id == own
    for mask in ("<mask>", plain.mask_id, 10**6):  # no name, and an id without a token: what the files say
        again = load_tokenizer_file(file, mask)
        assert (again.mask_id, again.size) == (plain.mask_id, plain.size)
    with pytest.raises(UserError, match=r"tokenizer.json has no mask token '<typo>': name one of its tokens"):
        load_tokenizer_file(file, "<typo>")
