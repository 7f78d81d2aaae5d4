"""Tokenizers of both kinds: special tokens, which one is the mask, files that will not do, and chat templates."""

import json
import random
import re
import types

import httpx
import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import pytest
import sentencepiece
import tokenizers
from conftest import config_with, serving, sharp_model, tiny_config
from etils import epath
from helpers import write_tokenizer

from refusion_jax import DecodeSettings, Request, UserError, decode, load_model
from refusion_jax.config.model import model_config
from refusion_jax.data import tasks
from refusion_jax.data.chat_template import ChatTemplate
from refusion_jax.data.examples import Example
from refusion_jax.data.fast_tokenizer import find_tokenizer_file, load_tokenizer_file
from refusion_jax.data.packing import tokenize
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.decoding.prompts import read_request
from refusion_jax.decoding.sampling import mask_logits
from refusion_jax.decoding.settings import TokenIds
from refusion_jax.model import huggingface, huggingface_config

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
    several = [{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": TEMPLATE}]
    tokenizer = load(tmp_path, chat_template=several, bos_token={"content": BOS}, eos_token=EOS)
    turns = (("user", "hi"), ("assistant", "yo"), ("user", "so"))
    (ids,) = tokenizer.encode_prompts([turns])
    assert tokenizer.render_chat([{"role": r, "content": c} for r, c in turns]) == (
        f"{BOS}[user]hi[assistant]yo{EOS}[user]so"
    )
    assert (ids[0], ids.count(tokenizer.bos_id), ids.count(tokenizer.eos_id)) == (tokenizer.bos_id, 1, 1)


def test_chats_are_rendered_with_and_without_thinking_and_with_the_beginning_of_an_answer(tmp_path):
    tokenizer, turns = load(tmp_path), [{"role": "user", "content": "hi"}]
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.has_chat_template
    assert tokenizer.encode_prompts(["hi", None]) == [plain.encode(asked, add_special_tokens=False).ids, []]
    assert tokenizer.render_chat(turns, thinking=True) == asked
    assert tokenizer.render_chat(turns, thinking=False) == asked + "<think>\n\n</think>\n\n"
    for begun in ("```python\n", "\n```python\n", "im"):  # as in lm_eval's mbpp_instruct; a part of <|im_end|>
        text = tokenizer.render_chat([*turns, {"role": "assistant", "content": begun}], True, answer_begun=True)
        assert text == asked + begun
    assert tokenizer.encode_chat([text])[0][0] == plain.token_to_id(BOS)  # the mark, not its letters
    assert (tokenizer.bos_id, tokenizer.eos_id) == (-1, plain.token_to_id(EOS))
    assert tokenizer.pad_id == plain.token_to_id("<|endoftext|>")
    told = load(tmp_path, chat_template="{{ tools is none and documents is none }}{{ tools }}")
    assert [told.render_chat(turns, tools=tools) for tools in (None, [], [1])] == ["TrueNone"] * 2 + ["False[1]"]


@pytest.mark.parametrize(("changes", "adds"), [({}, 1), ({"add_bos_token": True}, 1), ({"add_bos_token": False}, 0)])
def test_a_bos_token_that_is_named_begins_texts_only_where_they_begin_so_in_transformers(tmp_path, changes, adds):
    """SmolLM2's and LLaDA's files name one that does not."""
    path = write_tokenizer(tmp_path, chat_template=None, bos_token="<|endoftext|>", **changes)
    tokenizer = load_tokenizer_file(path, "<mask>")
    begun = [tokenizer.bos_id] * adds
    assert tokenizer.encode_prompts(["number", None]) == [begun + tokenizer.encode(["number"])[0], begun]
    assert (tokenizer.bos_id >= 0) == adds


def test_a_token_with_a_role_is_special_whatever_tokenizer_json_says_of_it(tmp_path):
    plain, file = load(tmp_path), tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] = [token | {"special": token["content"] != EOS} for token in content["added_tokens"]]
    file.write_text(json.dumps(content))
    tokenizer, text = load_tokenizer_file(file, "<mask>"), ["a" + EOS]
    assert tokenizer.encode(text) == plain.encode(text)
    assert tokenizer.encode_chat(text) == plain.encode_chat(text) == [[*plain.encode(["a"])[0], plain.eos_id]]
    assert tokenizer.decode([*plain.encode(["a"])[0], plain.eos_id]) == "a"


def test_a_tokenizer_that_fails_at_a_text_is_named(tmp_path):
    path = write_tokenizer(tmp_path, chat_template=None)
    model = {"type": "WordLevel", "vocab": {"<|im_end|>": 0}, "unk_token": "gone"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    with pytest.raises(UserError, match="tokenizer.json is a tokenizer that fails: "):
        load_tokenizer_file(path, "<mask>").encode(["a" * 40 + "b"])


def test_lengths_that_a_tokenizer_was_once_used_with_do_not_matter(tmp_path):
    path = write_tokenizer(tmp_path)
    known = load_tokenizer_file(path, "<mask>").encode(["What is the number?", "It"])
    fill = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    changes = {"truncation": cut, "padding": {"strategy": {"Fixed": 99}, **fill}}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert load_tokenizer_file(path, "<mask>").encode(["What is the number?", "It"]) == known


def test_a_sentencepiece_model_next_to_tokenizer_json_is_left_alone(tmp_path):
    path = epath.Path(write_tokenizer(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"as Gemma, Llama 2 and Mistral are released")
    assert find_tokenizer_file(epath.Path(tmp_path)) == path


def test_an_eos_that_is_also_the_padding_can_still_be_written(tmp_path):
    assert load(tmp_path, eos_token=EOS, pad_token=BOS).pad_id >= 0
    tokenizer = load(tmp_path, eos_token=EOS, pad_token=EOS)
    model = model_config(config_with(), tokenizer)
    ids, may_end = TokenIds.of(DecodeSettings("ar"), model), jnp.ones((1, 1), bool)
    _, logits = mask_logits(jnp.zeros((1, 1, model.vocab_size)), may_end, ids)
    assert jnp.isfinite(logits[0, 0, tokenizer.eos_id])


def test_the_mask_token_is_the_one_that_is_named(tmp_path):
    plain = load(tmp_path)
    own = plain.encode(["number"])[0][0]
    (tmp_path / "tokenizer.json").write_bytes(plain.files["tokenizer.json"])
    file = epath.Path(tmp_path / "tokenizer.json")
    assert load_tokenizer_file(file, plain.name_of(own)).mask_id == load_tokenizer_file(file, own).mask_id == own
    for mask in ("<mask>", plain.mask_id, 10**6):  # no name, and an id without a token: what the files say
        again = load_tokenizer_file(file, mask)
        assert (again.mask_id, again.size) == (plain.mask_id, plain.size)
    for wrong in ("<typo>", plain.name_of(plain.eos_id)):
        with pytest.raises(UserError, match=rf"tokenizer.json has no mask token '{re.escape(wrong)}': name one of its"):
            load_tokenizer_file(file, wrong)


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
    (document,) = tokenize([Example(None, "a b a\u00e9 b", "a line")], tokenizer, 64, slice_size=3)  # in four slices
    assert tokenizer.decode(document.tokens.tolist()) == "a b a\u00e9 b"


@pytest.mark.thorough
def test_a_completion_goes_on_after_its_prompt_with_all_spaces_and_before_what_follows(tmp_path):
    huggingface.save(sharp_model(vocab_size=512, num_tokens=512), tmp_path)
    tokenizer = load_tokenizer_file(write_llama(tmp_path), "<mask>")
    (suffix,) = tokenizer.encode_inside(["ab"])
    assert [tokenizer.name_of(token) for token in suffix] == ["a", "b"]
    (prompt,), model = tokenizer.encode(["a"]), load_model(tmp_path)
    out = decode(model, [Request(prompt, (8, suffix))], DecodeSettings("refusion", max_new_tokens=8))
    with serving(f"--checkpoint={tmp_path}", "--decode.method=refusion", "--decode.batch_size=1") as address:
        how = {"prompt": "a", "suffix": "ab", "max_tokens": 8, "commits": True}
        (one,) = httpx.post(f"{address}/v1/completions", json=how, timeout=60).json()["choices"]
        assert [token for _, token in sorted(one["commits"])] == out.tokens[0][:8]
        how = {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 32}
        how |= {"structured_outputs": {"choice": [" b  ab"]}}
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


def test_a_template_may_use_what_transformers_offers_but_the_date():
    source = "{% for x in [m, 2] %}{{ x | tojson }}{% break %}{% endfor %}{{ strftime_now is defined }}"
    assert ChatTemplate(source, "here").render(m={"a<b>&'\u00e9": 1}) == '{"a<b>&\'\u00e9": 1}False'
    marked = "{% generation %}{{ m }}{% set x = 1 %}{% endgeneration %}, {{ strftime_now('%d %B %Y') }}"
    assert ChatTemplate(marked, "here").render(m="b") == "b, 01 July 2025"  # SmolLM3's insists on a date


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for", "here: the chat template cannot be read: "),
        ("{% break %}", "here: the chat template cannot be read: 'break' outside loop"),
        ("{{ messages.__class__.__mro__ }}", "^the chat template fails: access to attribute"),
        ("{{ nobody.knows }}", "^the chat template fails: 'nobody' is undefined"),
        ("{{ messages + 1 }}", "^the chat template fails: "),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_one_line(source, said):
    with pytest.raises(UserError, match=said) as error:
        ChatTemplate(source, "here").render(messages=[])
    assert "\n" not in str(error.value)


def corpus():
    return [text for p in tasks.MIXTURE.problems("train", 500, seed=0) for text in (p.query, p.response)]


@pytest.fixture(scope="module", params=["pieces", "byte_pairs"])
def tokenizer(request, tmp_path_factory):
    if request.param == "pieces":
        return SentencePieceTokenizer.train(corpus(), 400)
    return load(tmp_path_factory.mktemp("tokenizer"))


def any_text():
    """All of Unicode but surrogates, which are no text, and U+2581, which sentencepiece uses for the space."""
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581\0"))


@hypothesis.given(any_text())
@hypothesis.example("  two  spaces\tand tabs\r\n\n and indentation\n    here ")
@hypothesis.example("<mask></s><s><pad><unk> are plain characters, as are <|im_end|> and <|mask|>")
@hypothesis.example("Grüße, 東京, 👩‍🚀, é")
def test_encoding_loses_nothing_and_makes_no_special_token(tokenizer, text):
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == b"".join(map(tokenizer.spelling, ids)).decode() == text
    assert not set(ids) & {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id}


def test_special_tokens_have_ids_of_their_own_and_leave_no_text(tokenizer):
    special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id}
    assert len(special) == 4
    assert all(0 <= i < tokenizer.size for i in special if i != -1)  # texts of the latter begin without
    (ids,) = tokenizer.encode(["plum"])
    assert tokenizer.decode([tokenizer.pad_id, *ids, tokenizer.mask_id, tokenizer.eos_id]) == "plum"
    assert not any(tokenizer.spelling(i) for i in special if i != -1)
    with pytest.raises(UserError, match="prompts='plum': must be a list of texts"):
        tokenizer.encode_prompts("plum")


def test_digits_are_tokens_of_their_own_however_common_a_number_is():
    tokenizer = SentencePieceTokenizer.train(["room 305 is room 305"] * 50, 300)
    assert [len(ids) for ids in tokenizer.encode(["room", "305"])] == [1, 3]


@pytest.mark.parametrize("tokenizer", ["pieces"], indirect=True)
def test_the_same_corpus_gives_the_same_tokenizer(tokenizer):
    assert SentencePieceTokenizer.train(corpus(), 400).model == tokenizer.model


def test_pieces_are_learnt_from_long_lines_of_any_script():
    rng = random.Random(0)
    words = ["".join(chr(rng.randrange(0x4E00, 0x4F00)) for _ in range(3)) for _ in range(60)]
    lines = ["".join(rng.choices(words, k=700)) for _ in range(20)]  # 2,100 characters, 6,300 bytes
    tokenizer = SentencePieceTokenizer.train(lines, 700)
    assert tokenizer.size == 700
    assert len(tokenizer.encode(lines[:1])[0]) < len(lines[0])


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    wanted = r"cannot train a tokenizer of 100 pieces on this corpus: it takes a vocab_size of at least (\d+)$"
    with pytest.raises(UserError, match=wanted) as refused:
        SentencePieceTokenizer.train(corpus(), 100)
    least = int(re.search(wanted, str(refused.value))[1])
    assert SentencePieceTokenizer.train(corpus(), least).size == least


def test_files_that_will_not_do_are_named(tmp_path):
    piece = "\u2581number"
    model = SentencePieceTokenizer.train([piece[1:] + piece] * 20, 300).model
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for name, content, said in (
        ("none.model", None, "none.model cannot be read: No such file"),
        ("text.model", b"not a model", "text.model is not a sentencepiece model"),
        ("torn.model", model.replace(piece.encode(), b"\xff" * len(piece.encode())), "torn.model is not a sentence"),
        ("tokenizer.json", None, "tokenizer.json cannot be read: No such file"),
        ("tokenizer.json", b"{}", "tokenizer.json is not a Hugging Face tokenizer"),
    ):
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=said):
            load_tokenizer_file(tmp_path / name, "<mask>")
    with pytest.raises(UserError, match="tokenizer_config.json names no eos_token"):
        load(tmp_path, eos_token=None)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="/tokenizer_config.json: is missing; it names the special tokens"):
        load_tokenizer_file(tmp_path / "tokenizer.json", "<mask>")
    (write_parts(tmp_path / "parts") / "merges.txt").unlink()
    with pytest.raises(UserError, match="merges.txt"):
        load_tokenizer_file(tmp_path / "parts" / "vocab.json", "<mask>")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pad_id": 3}, "has no mask token '<mask>': name its own with --mask_piece .* take a tokenizer.json"),
        ({"control_symbols": ["<mask>"]}, "has no pad token"),
    ],
)
def test_a_tokenizer_without_a_special_token_is_refused(tmp_path, options, said):
    prefix = tmp_path / "other"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_prefix=str(prefix), vocab_size=80, minloglevel=2, **options
    )
    with pytest.raises(UserError, match=said):
        load_tokenizer_file(prefix.with_suffix(".model"), "<mask>")


def test_a_mask_piece_of_another_name_is_trained_and_found_again():
    tokenizer = SentencePieceTokenizer.train(corpus(), 400, "[MASK]")
    assert SentencePieceTokenizer(tokenizer.model, "it", "[MASK]").mask_id == tokenizer.mask_id


def test_a_tokenizer_of_many_more_ids_than_rows_is_another_models(tmp_path):
    described = huggingface_config.describe(tiny_config(), "float32")
    (tmp_path / "config.json").write_text(json.dumps(described))
    own = types.SimpleNamespace(size=32 + 1024, eos_id=2, mask_id=4)
    assert huggingface_config.read_model_config(epath.Path(tmp_path), own).vocab_size == 1152
    own.size += 1
    with pytest.raises(UserError, match="a tokenizer of 1057 ids is not that of 32 rows"):
        huggingface_config.read_model_config(epath.Path(tmp_path), own)
