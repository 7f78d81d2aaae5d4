"""The pinned task files: prompts, and whether right and wrong answers are told apart, on small data of our own."""

import json

import datasets
import lm_eval
import pytest
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from refusion_jax import UserError
from refusion_jax.evaluation import benchmark, sandbox
from refusion_jax.evaluation.tasks import scoring

PROBLEM = {"prompt": "def add(a, b):\n    '''Adds.'''\n", "entry_point": "add"}
PROBLEM["test"] = "def check(add):\n    assert add(2, 3) == 5\n"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(5, 5) == 10"]
ARC = {"question": "Which floats?", "choices": {"text": ["a stone", "a cork", "lead", "iron"], "label": list("ABCD")}}
GPQA = {"Question": "Which is right?", "Correct Answer": "this one"}
GPQA |= {f"Incorrect Answer {i}": f"not {i}" for i in (1, 2, 3)}

# task -> a problem, words of its prompt, an answer that is right, one that is not, the metric
CASES = {
    "gsm8k": (
        {"question": "How many?", "answer": "2 and 2 is 4 #### 1,004"},
        'end with "The answer is [result]," where',
        *("So. The answer is 1004.", "The answer is 5.", "exact_match,strict-match"),
    ),
    "math": (
        {"problem": "Half of 1?", "solution": r"It is $\boxed{\frac{1}{2}}$."},
        "Problem:\nHalf of 1?\n\nSolution:",
        *(r"We get $\boxed{\dfrac12}$", r"$\boxed{2}$", "math_verify,none"),
    ),
    "humaneval": (
        PROBLEM,
        "make sure that it passes the tests:\n```def add",
        *("def add(a, b):\n    return a + b\n```\nDone.", "def add(a, b):\n    return a\n", "pass@1,run_tests"),
    ),
    "mbpp": (
        {"text": "Add two numbers.", "test_list": TESTS, "test_setup_code": ""},
        "Your code should pass these tests:\n\nassert add(1, 2) == 3\n",
        *("```python\ndef add(a, b):\n    return a + b\n```", "def add(a, b): pass", "pass@1,run_tests"),
    ),
    "mmlu_pro": (
        {"question": "Which?", "options": ["x", "y", "z"], "answer": "C"},
        "Options:\nA. x\nB. y\nC. z\nAnswer: Let's think step by step.",
        *("So the answer is (C).", "the answer is (A)", "exact_match,custom-extract"),
    ),
    "arc_c": (ARC | {"answerKey": "2"}, "\nB. a cork\nC. lead", " B", " C", "exact_match,remove_whitespace"),
    "gpqa": (GPQA, "enclosed in parentheses", "I think ({right})", "I think ({wrong})", "exact_match,flexible-extract"),
}


class Parrot(LM):
    """Says the same to everything, and remembers what it was asked."""

    def __init__(self, answer: str):
        super().__init__()
        self.answer, self.asked = answer, []

    def generate_until(self, requests):
        self.asked += [request.args for request in requests]
        return [self.answer] * len(requests)

    loglikelihood = loglikelihood_rolling = None


@pytest.fixture(autouse=True)
def _cached_here(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def score(name: str, answer: str, directory) -> tuple[float, tuple]:
    plan = benchmark.Plan([name], task_data=directory, allow_code_execution=True)
    lm = Parrot(answer)
    tasks = benchmark.load_tasks(plan)
    with sandbox.allow():
        manager = TaskManager(include_path=[benchmark.PINNED], include_defaults=False)  # lm_eval's take seconds to scan
        how = {"confirm_run_unsafe_code": True, "bootstrap_iters": 0, "task_manager": manager}
        results = lm_eval.simple_evaluate(model=lm, tasks=list(tasks), **how)
    return results["results"][name][CASES[name][4]], lm.asked[0]


@pytest.mark.parametrize("name", CASES)
def test_a_right_answer_counts_and_a_wrong_one_does_not(name, tmp_path):
    try:
        sandbox.run("pass")
    except UserError as error:
        pytest.skip(f"this kernel shuts nothing in: {error}")
    problem, words, right, wrong, _ = CASES[name]
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(problem) + "\n")
    if name == "gpqa":
        docs = scoring.shuffle_options(datasets.Dataset.from_list([problem]))
        letter = docs[0]["answer"][1]
        right, wrong = right.format(right=letter), wrong.format(wrong="ABCD".replace(letter, "")[0])
    value, (prompt, options) = score(name, right, tmp_path)
    assert words in prompt
    assert value == 1
    assert options["max_gen_toks"] == 512
    assert score(name, wrong, tmp_path)[0] == 0


def test_options_are_shuffled_the_same_every_time_and_not_always_alike():
    docs = [GPQA | {"Question": f"Question {i}?"} for i in range(40)]
    first, second = (scoring.shuffle_options(datasets.Dataset.from_list(docs))["answer"] for _ in range(2))
    assert list(first) == list(second)
    assert len(set(first)) == 4


def test_settings_of_the_pinned_tasks_are_the_authors():
    expected = {  # slot size, serial blocks, slot threshold, token threshold
        "gsm8k": (32, 4, 0.9, 0.4),
        "gpqa": (8, 32, 0.8, 0.2),
        "math": (32, 8, 0.8, 0.6),
        "mbpp": (32, 4, 0.9, 0.3),
        "humaneval": (32, 4, 0.9, 0.4),
        "arc_c": (8, 64, 0.8, 0.1),
        "mmlu_pro": (16, 4, 0.9, 0.4),
    }
    assert set(expected) == {path.stem for path in benchmark.PINNED.glob("*.yaml")} == set(CASES)
    files = TaskManager(include_path=[benchmark.PINNED], include_defaults=False).task_index
    for name, settings in expected.items():
        decode = files[name].cfg["metadata"]["decode"]
        assert tuple(decode[key] for key in ("slot_size", "serial_blocks", "slot_threshold", "token_threshold")) == (
            settings
        )
        assert decode["max_new_tokens"] == 512


def test_the_last_named_answer_is_read():
    assert scoring.final_answer(r"so $\boxed{3}$, no: $\boxed{\text{A} + {b}}$") == "A+{b}"
    assert scoring.final_answer("Final Answer: The final answer is $1,000$. I hope it is correct.") == "1000"
    assert scoring.final_answer("nothing") is None


@pytest.mark.parametrize(
    "text",
    [
        "The final answer is:\n\\[\n\\boxed{5}\n\\]",
        "The final answer is\n\n$$\n\\boxed{5}\n$$",
        "The final answer is as follows.\n$\\boxed{5}$",
        "The final answer is 5. I have checked it.",
        "**The final answer is 5**",
        "The final answer is **5**.",
        "The Final Answer is 5",
        r"The final answer is \(5\).",
        r"The final answer is \[5\].",
        "The final answer is $\\boxed{5}$, which is prime.",
    ],
)
def test_an_answer_is_found_after_its_name_however_it_is_set(text):
    assert scoring.final_answer(text) == "5"


def test_a_comma_belongs_to_a_number_but_not_to_a_pair():
    assert scoring.final_answer(r"\boxed{12,345,000}") == scoring.final_answer(r"\boxed{12345000}")
    assert scoring.final_answer(r"The final answer is \(1,200\).") == "1200"
    for pair, number in ((r"\boxed{(1,200)}", r"\boxed{(1200)}"), (r"\boxed{\{1,234\}}", r"\boxed{\{1234\}}")):
        assert scoring.final_answer(pair) != scoring.final_answer(number)


@pytest.mark.parametrize("sentence", ["{}", "The final answer is: ${}$", "The final answer is ${}$. I hope so."])
@pytest.mark.parametrize(
    ("written", "plain"),
    [
        (r"\boxed{4}", "4"),
        (r"x = \boxed{\frac43}", r"\frac{4}{3}"),
        (r"\boxed{\dfrac{1}2}", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\boxed 5", "5"),
        (r"\boxed{-.5}", "-0.5"),
        (r"\boxed{\$.50}", "0.50"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\{1,2."),
        (r"\boxed{\frac{\sqrt{3}}2 + \frac{1}{2}}", r"\frac{\sqrt{3}}{2}+\frac{1}{2}"),
    ],
)
def test_a_box_is_opened_wherever_the_answer_is_named(sentence, written, plain):
    answer = sentence.replace("{}", written)
    assert scoring.final_answer(answer) == plain.rstrip(".")
    assert scoring.score_math({"solution": rf"$\boxed{{{plain}}}$"}, [answer])["exact_match"] == 1


CODE = "def add(a, b):\n    return a + b\n"
USE = "Use it like this:\n```python\nprint(add(1, 2))\n```"


@pytest.mark.parametrize("fence", ["```", "```py", "```Python", "```python3", "```python \t", "``` python"])
@pytest.mark.parametrize("before", ["", "Here it is:\n\n", "First\n```bash\npip install x\n```\nand then\n"])
@pytest.mark.parametrize("after", ["", "```", f"```\n{USE}"])
def test_the_first_block_of_python_is_run(fence, before, after):
    assert scoring.code_of(f"{before}{fence}\n{CODE}{after}") == CODE


@pytest.mark.parametrize("after", ["", "```", "```\nDone.", f"```\n{USE}"])
def test_an_answer_that_begins_with_code_ends_with_its_block(after):
    assert scoring.code_of(CODE + after, is_begun=True) == CODE
    assert scoring.code_of(f"```python\n{CODE}{after}", is_begun=True) == CODE  # it begins the block once more
    if USE not in after:
        assert scoring.code_of(CODE + after) == CODE


def test_generated_code_needs_leave(tmp_path):
    with pytest.raises(UserError, match="only with --allow_code_execution"):
        sandbox.run_allowed(["pass"])
