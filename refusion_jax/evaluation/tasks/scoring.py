"""Functions that the pinned task files need: reading answers, and running them.

The harness loads this file with the task files that name its functions.
"""

import hashlib
import random
import re
import warnings

import datasets
import math_verify

from refusion_jax.evaluation import sandbox

_SUBJECTS = "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra precalculus"


def load_math(**_: object) -> dict[str, datasets.Dataset]:
    """The test sets of MATH's seven subjects as one."""
    parts = [datasets.load_dataset("EleutherAI/hendrycks_math", name, split="test") for name in _SUBJECTS.split()]
    return {"test": datasets.concatenate_datasets(parts)}


def score_math(doc: dict, results: list[str]) -> dict[str, float]:
    """Whether an answer equals that of the worked solution, as text and mathematically."""
    gold, answer = final_answer(doc["solution"]), final_answer(results[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the LaTeX parser's, about answers that are not LaTeX
        same = math_verify.verify(math_verify.parse(doc["solution"]), math_verify.parse(results[0]))
    return {"exact_match": float(gold is not None and gold == answer), "math_verify": float(same)}


# To the end of the sentence or the line.
_NAMED = re.compile(r"final answer is:?\s*(.+?)(?:\.\s|\s*(?:\n|$))", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_UNBRACED = re.compile(r".*?(?=\$|\n|\\\)|\\\]|\Z)")  # what follows a box without braces


def final_answer(text: str) -> str | None:
    r"""The last answer in a text, with markup removed: after "final answer is", or else in \boxed{}."""
    named, boxes = list(_NAMED.finditer(text)), list(_BOX.finditer(text))
    if named:
        boxes = [box for box in boxes if box.start() >= named[-1].start(1)]  # formulas may be on separate lines
    if boxes:
        return _plain(_content(text, boxes[-1].end()))
    return _plain(named[-1][1]) if named else None


def _content(text: str, at: int) -> str:
    """The content, from index `at`, of a box."""
    if text[at : at + 1] != "{":
        return _UNBRACED.match(text, at)[0]
    depth = 0
    for token in re.compile(r"\\.|[{}]").finditer(text, at):  # a brace after a backslash is literal
        depth += (token[0] == "{") - (token[0] == "}")
        if depth == 0:
            return text[at + 1 : token.start()]
    return text[at + 1 :]


def _plain(answer: str) -> str:
    answer = re.sub(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}", r"\1", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\(left|right)|\\[()\[\]]", "", answer)  # the latter enclose a formula
    answer = re.sub(r"\\[!,;: ]|\\%|\^\{?\\circ\}?|\\\$|\$|\s", "", answer)
    if not re.search(r"[(\[]|\\\{", answer):  # in a pair, set or interval a comma separates numbers
        answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer)
    answer = re.sub(r"\\frac([0-9A-Za-z])", r"\\frac{\1}", answer)  # \frac43 is \frac{4}{3}
    answer = re.sub(r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\})([0-9A-Za-z])", r"\1{\2}", answer)
    return re.sub(r"(?<!\d)\.(?=\d)", "0.", answer.lstrip("*").rstrip("*."))  # .5 is 0.5


def shuffle_options(docs: datasets.Dataset) -> datasets.Dataset:
    """The four options of each question, in an order that depends only on the question, and the right one's letter."""

    def shuffled(doc: dict) -> dict:
        right = _clean(doc["Correct Answer"])
        options = [_clean(doc[f"Incorrect Answer {i}"]) for i in (1, 2, 3)] + [right]
        seed = hashlib.blake2b(doc["Question"].encode(), digest_size=8).digest()
        random.Random(seed).shuffle(options)
        return {"choices": options, "answer": f"({'ABCD'[options.index(right)]})"}

    return docs.map(shuffled)


def _clean(text: str | None) -> str:
    return " ".join((text or "").replace(" [title]", ". ").split())


def run_humaneval(resps: list[list[str]], docs: list[dict]) -> list[list[dict]]:
    """Runs every answer, appended to the given beginning, against the tests of its problem."""

    def program(doc: dict, answer: str) -> str:
        code = code_of(answer, is_begun=True)
        return f"{doc['prompt']}\n{code}\n{doc['test']}\ncheck({doc['entry_point']})"

    return _run(resps, docs, program)


def run_mbpp(resps: list[list[str]], docs: list[dict]) -> list[list[dict]]:
    """Runs every answer against the tests of its problem."""
    setup = "test_setup_code"
    return _run(resps, docs, lambda doc, text: "\n".join([doc.get(setup) or "", code_of(text), *doc["test_list"]]))


def _run(resps, docs, program) -> list[list[dict]]:
    programs = [[program(doc, text) for text in texts] for texts, doc in zip(resps, docs, strict=True)]
    outcomes = iter(sandbox.run_allowed([p for some in programs for p in some]))
    return [[{**vars(next(outcomes)), "program": text} for text in some] for some in programs]


_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PROGRAM = re.compile(r"^(?:(?:async def|def|class|import) |from [\w.]+ import )", re.MULTILINE)


def code_of(answer: str, is_begun: bool = False) -> str:
    """The first block of Python in an answer, which may begin inside one; without one, all up to the first fence."""
    if is_begun and not answer.lstrip().startswith("```"):
        return answer.split("```", 1)[0]
    for block in _BLOCK.finditer(answer):
        language, code = block[1].lower(), block[2]
        if not language and _PROGRAM.search(answer, 0, block.start()):
            break  # the fence ends a block without a beginning
        if language in ("", "py", "python", "python3"):
            return code
    return answer.split("```", 1)[0]


def count_passed(doc: dict, results: list[list[dict]]) -> dict[str, float]:
    """pass@1 of the answers to a problem: the share of those that pass."""
    passed = [verdict["passed"] for verdict in results[0]]
    return {"pass@1": sum(passed) / len(passed)}
