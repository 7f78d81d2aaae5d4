"""Tokenizers of Hugging Face: special tokens in prompts, and which token is the mask."""

import json

import httpx
import jax.numpy as jnp
import pytest
import sentencepiece
import tokenizers
from conftest import serving
from etils import epath
from helpers import tiny_qwen3, write_tokenizer

from refusion_jax import DecodeSettings, UserError
from refusion_jax.config import default_config
from refusion_jax.config.model import model_config
from refusion_jax.data.fast_tokenizer import find_tokenizer_file, load_tokenizer_file
from refusion_jax.decoding.prompts import read_request
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
    told = load(tmp_path, chat_template="{{ tools is none and documents is none }}{{ tools }}")
    assert [told.render_chat(turns, tools=tools) for tools in (None, [], [1])] == ["TrueNone"] * 2 + ["False[1]"]


def test_a_sentencepiece_model_next_to_tokenizer_json_is_left_alone(tmp_path):
    path = epath.Path(write_tokenizer(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"as Gemma, Llama 2 and Mistral are released")
    assert find_tokenizer_file(epath.Path(tmp_path)) == path


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


def write_parts(path, merges=(), **changes):
    """The directory of a tokenizer of Qwen2's without tokenizer.json, as ReFusion is released."""
    tokenizer = json.loads(write_tokenizer(path).read_text())
    (path / "tokenizer.json").unlink()
    vocab = {piece: at for piece, at in tokenizer["model"]["vocab"].items() if len(piece) == 1}
    vocab |= {left + right: len(vocab) + i for i, (left, right) in enumerate(merges)}
    (path / "vocab.json").write_text(json.dumps(vocab))
    (path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    config = json.loads((path / "tokenizer_config.json").read_text())
    names = [EOS, "<think>", "<|mask|>"]
    added = {len(vocab) + i: {"content": name, "special": name != "<think>"} for i, name in enumerate(names)}
    parts = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": EOS, "added_tokens_decoder": added}
    (path / "tokenizer_config.json").write_text(json.dumps(config | parts | changes))
    return epath.Path(path)


def test_vocabulary_and_merges_of_qwen2_are_read_where_there_is_no_tokenizer_json(tmp_path):
    merges = [("1", "2"), ("?", "\u010a"), ("'", "S"), ("\u00c3", "\u00a9")]
    tokenizer = load_tokenizer_file(find_tokenizer_file(write_parts(tmp_path / "parts", merges)), "<mask>")
    assert (tokenizer.eos_id, tokenizer.mask_id, tokenizer.size, tokenizer.adds_mask) == (260, 262, 263, False)
    texts = ["12", "a?\n", "a'S", "e\u0301", "<think>"]
    pieces = [[tokenizer.name_of(token) for token in ids] for ids in tokenizer.encode(texts)]
    assert pieces[:4] == [["1", "2"], ["a", "?\u010a"], ["a", "'S"], ["\u00c3\u00a9"]]  # a digit stands alone
    assert tokenizer.encode_chat(["<think>x" + EOS]) == [[261, *tokenizer.encode(["x"])[0], 260]]
    assert tokenizer.decode([*tokenizer.encode(["h\u00e9"])[0], 261, 260]) == "h\u00e9<think>"
    (ids,) = tokenizer.encode(["\n h\u00e9\u6771\U0001f680\ufffd"])
    assert b"".join(map(tokenizer.spelling, [*ids, 261, 260])).decode() == "\n h\u00e9\u6771\U0001f680\ufffd<think>"
    for name, content in tokenizer.files.items():
        (tmp_path / name).write_bytes(content)
    again = load_tokenizer_file(find_tokenizer_file(epath.Path(tmp_path)), tokenizer.mask_id)
    assert (again.files, again.encode(texts)) == (tokenizer.files, tokenizer.encode(texts))


def write_llama(path):
    """A tokenizer of Llama 2's and Mistral's kind, which begins every text with a space of its own."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581ab", "\u2581a"]
    vocab = {name: number for number, name in enumerate(names)}
    model = tokenizers.models.BPE(vocab, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>")
    llama = tokenizers.Tokenizer(model)
    spaces = [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    llama.normalizer = tokenizers.normalizers.Sequence(spaces)
    d = tokenizers.decoders
    llama.decoder = d.Sequence([d.Replace("\u2581", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    llama.add_special_tokens(["<s>", "</s>"])
    llama.save(f"{path}/tokenizer.json")
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return path / "tokenizer.json"


def write_sentencepiece(path):
    """A model that sentencepiece trains by default, which begins every text so, too; spaces stay."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b"] * 9), model_prefix=f"{path}/own", vocab_size=270, hard_vocab_limit=False,
        model_type="bpe", byte_fallback=True, pad_id=3, control_symbols=["<mask>"], minloglevel=2,
        remove_extra_whitespaces=False,
    )  # fmt: skip
    return path / "own.model"


@pytest.mark.parametrize("write", [write_llama, write_sentencepiece])
def test_tokens_are_spelled_as_they_stand_in_a_text_whose_first_space_is_the_tokenizers_own(write, tmp_path):
    tokenizer = load_tokenizer_file(write(tmp_path), "<mask>")
    (ids,) = tokenizer.encode(["a b  a\u00e9"])
    assert tokenizer.decode(ids) == "a b  a\u00e9"
    assert tokenizer.continuation(ids) == " a b  a\u00e9"
    assert b"".join(map(tokenizer.spelling, [1, *ids, 2])) == " a b  a\u00e9".encode()
    template = ["a b", 2, "a b", " \u00e9", 1, "b"]
    given = read_request({"template": template}, tokenizer, DecodeSettings("refusion"), "a line").template
    ids = [id for x in given if not isinstance(x, int) for id in x]
    assert tokenizer.decode(ids) == "a ba b \u00e9b"  # no space but those that are given


@pytest.mark.thorough
def test_a_completion_goes_on_after_its_prompt_with_all_spaces(tmp_path):
    tiny_qwen3(tmp_path, eos_token_id=2)
    write_llama(tmp_path)
    with serving(f"--checkpoint={tmp_path}", "--decode.method=ar", "--decode.batch_size=1") as address:
        how = {"prompt": "a", "guided_choice": [" b  ab"], "echo": True, "logprobs": 1, "max_tokens": 32}
        (one,) = httpx.post(f"{address}/v1/completions", json=how, timeout=60).json()["choices"]
        events = httpx.post(f"{address}/v1/completions", json=how | {"stream": True}, timeout=60).text
    assert (one["text"], one["finish_reason"]) == ("a b  ab", "stop")
    assert "".join(one["logprobs"]["tokens"]) == one["text"]
    pieces = [json.loads(line[6:])["choices"][0] for line in events.split("\n") if line.startswith("data: {")]
    assert "".join(piece["text"] for piece in pieces) == one["text"]
    assert [token for piece in pieces for token in piece["logprobs"]["tokens"]] == one["logprobs"]["tokens"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, "vocab.json of tokenizer_class='GPT2Tokenizer' is not supported"),
        ({"added_tokens_decoder": {7: {"content": EOS}}}, r"vocab.json gives '<\|im_end\|>' another id than .*json, 7"),
        ({"added_tokens_decoder": {"x": {"content": EOS}}}, "tokenizer_config.json: added_tokens_decoder.x"),
    ],
)
def test_a_vocabulary_that_would_be_cut_otherwise_is_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        load_tokenizer_file(write_parts(tmp_path / "parts", **changes) / "vocab.json", "<mask>")


def test_merges_that_are_not_there_are_named(tmp_path):
    (write_parts(tmp_path / "parts") / "merges.txt").unlink()
    with pytest.raises(UserError, match=r"merges.txt"):
        load_tokenizer_file(epath.Path(tmp_path / "parts" / "vocab.json"), "<mask>")
