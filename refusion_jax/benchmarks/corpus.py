"""Writes a corpus for `prepare` in which copies are planted: how many it should leave out is known.

  python -m refusion_jax.bench corpus --output=corpus --copies=near
  python -m refusion_jax.prepare --input='corpus/*.jsonl' --tokenizer=my.model --dedup --near_dedup --output=out

Texts have 150 to 399 words: those of Python's own manual, with probabilities proportional to 1 / (rank + 10). One of a
hundred is a copy of one of the last 20,000: of all words; or `near`, of its first ones, so many that 0.8 of the 5-grams
of both are shared (Jaccard), with new ones after them; or `part`, of its first 80 %. `dropped` in out/manifest.json
tells what `prepare` left out.
"""

import collections
import json
import pydoc_data.topics
import random
import re
from pathlib import Path

from absl import flags

from refusion_jax.cli.errors import UserError

COPIES = ("none", "exact", "near", "part")
_RECENT, _OFTEN, _OF_A_FILE = 20_000, 100, 50_000


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_string("output", None, "Directory of the files, which is made", flag_values=own)
    flags.DEFINE_integer("texts", 50_000, "Texts in the corpus", 1, flag_values=own)
    flags.DEFINE_enum("copies", "none", COPIES, "What is planted", flag_values=own)
    flags.DEFINE_integer("seed", 0, "Seed of the texts", flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Writes the files, and prints the number of texts and copies."""
    if own.output is None:
        raise UserError("--output=DIR is needed; --help explains")
    directory = Path(own.output)
    directory.mkdir(parents=True)
    draw = random.Random(own.seed)
    counts = collections.Counter(re.findall("[a-z]{2,12}", " ".join(pydoc_data.topics.topics.values()).lower()))
    words = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    recent, copies = collections.deque(maxlen=_RECENT), 0
    for begin in range(0, own.texts, _OF_A_FILE):
        with open(directory / f"{begin:09}.jsonl", "w", encoding="utf-8") as file:
            for _ in range(begin, min(begin + _OF_A_FILE, own.texts)):
                text = draw.choices(words, weights, k=draw.randrange(150, 400))
                if own.copies != "none" and recent and not draw.randrange(_OFTEN):
                    text, copies = copy_of(draw.choice(recent), text, own.copies), copies + 1
                else:
                    recent.append(text)
                file.write(json.dumps({"text": " ".join(text)}) + "\n")
    print(json.dumps({"benchmark": "corpus", "texts": own.texts, "copies": copies, "kind": own.copies}))


def copy_of(text: list[str], new: list[str], kind: str) -> list[str]:
    """A copy of a text; `new` has words to go on with."""
    if kind == "exact":
        return text
    if kind == "part":
        return text[: len(text) * 8 // 10]
    kept = 4 + (len(text) - 4) * 8 // 9  # of n - 4 5-grams 8/9 are shared: a Jaccard similarity of 8 / (9 + 9 - 8)
    return text[:kept] + (new * 3)[: len(text) - kept]
