"""A tokenizer.json is a stranger's: what its rules would multiply is refused, and what they only rewrite is not."""

import json
import resource

import pytest
from etils import epath

from refusion_jax import UserError
from refusion_jax.data.fast_tokenizer import FastTokenizer

MODEL = {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1, "a": 2}, "unk_token": "<unk>"}
END = {
    "id": 1,
    "content": "</s>",
    "special": True,
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*rules):
    return {"type": "Sequence", "normalizers": [*rules]}


def tokenizer(directory, **parts):
    file = {"version": "1.0", "added_tokens": [END], "normalizer": None, "pre_tokenizer": None, "model": MODEL}
    (directory / "tokenizer.json").write_text(json.dumps(file | parts))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return FastTokenizer(epath.Path(directory / "tokenizer.json"), "<mask>")


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": replace("a", "b" * 10_000)},
        {"normalizer": sequence(*[replace("a", "a" * 10)] * 9)},
        {"normalizer": sequence(sequence(replace("a", "b" * 1000)), replace("b", "c" * 1000), replace("c", ""))},
        {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "a" * 3000}] * 3}},
        {"normalizer": replace("a(?=.{500})", "b" * 50_000, "Regex")},
        {"normalizer": replace("", "b" * 50_000, "Regex")},
        {"normalizer": sequence({"type": "Prepend", "prepend": "a" * 3000}, replace("a", "b" * 3000))},
        {"normalizer": sequence(*[{"type": "ByteLevel"}] * 40)},
        {"normalizer": [[replace("a", "b" * 10_000)] * 3]},
        {"normalizer": sequence(*[replace("a", "b")] * 65)},
        {"normalizer": replace("a", "b" * 9_000_000), "added_tokens": [END | {"content": "a", "normalized": True}]},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}},
        {"decoder": {"type": "Sequence", "decoders": [replace("a", "a" * 1000)] * 3}},
        {"model": MODEL | {"vocab": MODEL["vocab"] | {"b" * 70_000: 3}}},
        {"model": MODEL | {"type": "WordPiece", "max_input_chars_per_word": 10**6, "continuing_subword_prefix": "#"}},
    ],
)
def test_what_multiplies_a_text_is_refused(parts, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=f"^{tmp_path}/tokenizer.json"):
        tokenizer(tmp_path, **parts).encode(["a" * 1000 + "\u00fc"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        (sequence({"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")), " a" * 400_000),
        (replace("z", "b" * 100_000), "a" * 400_000),
        (sequence(*[replace(" {2,}", " ", "Regex")] * 8), "a" * 400_000),
        (replace("a", "b" * 1000), "a" * 50),
        ({"type": "NFKD"}, "\ufdfa" * 100_000),
    ],
)
def test_what_rewrites_a_text_is_not(normalizer, text, tmp_path):
    assert len(tokenizer(tmp_path, normalizer=normalizer).encode([text])[0]) == 1


def test_a_table_that_ends_the_library_is_refused_in_one_line(tmp_path, capfd):
    with pytest.raises(UserError, match="tokenizer.json is a tokenizer that fails: index out of bounds"):
        tokenizer(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAAAGFhYWE="})
    assert capfd.readouterr() == ("", "")
