import itertools

import pytest

from refusion_jax.data import tasks

ANSWERS = {
    "add": ("Add 47 and 85.", "7+5+0=12; 4+8+1=13; 132"),
    "sort": ("Sort 7 3 9 1.", "1 3 7 9"),
    "reverse": ("Reverse red blue green.", "green blue red"),
    "replace": ("Replace fig by lime: fig pear fig.", "lime pear lime"),
    "table": ("Table ann fig red, bob kiwi blue, cat pear gold. Column 2.", "fig kiwi pear"),
    "quote": ("Quote ann fig tom.", '"ann", "fig", "tom"'),
    "json": ('From {"name": "ann", "age": 41, "room": 305} take room, name.', '{"room": 305, "name": "ann"}'),
}


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_each_family_solves_a_problem_worked_out_by_hand(family):
    query, response = ANSWERS[family]
    assert tasks.FAMILIES[family].solve(query) == response


def test_a_row_of_a_table_is_asked_for_alike():
    assert tasks.FAMILIES["table"].solve("Table ann fig red, bob kiwi blue, cat pear gold. Row 2.") == "bob kiwi blue"


def test_sums_are_right():
    for problem in (p for p in tasks.problems("train", 2000, seed=1) if p.family == "add"):
        a, b = map(int, problem.query[len("Add ") : -1].split(" and "))
        assert problem.response.endswith(f"; {a + b}")


def test_train_and_test_are_disjoint_and_every_family_is_in_both():
    train = list(tasks.problems("train", 20_000, seed=0))
    test = list(tasks.problems("test", 2000, seed=0))
    assert not {p.query for p in train} & {p.query for p in test}
    for problems in (train, test):
        assert {p.family for p in problems} == set(tasks.FAMILIES)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    def first(seed):
        return list(itertools.islice(tasks.problems("train", 50, seed), 50))

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_the_checker_accepts_the_right_answer_and_nothing_else():
    for problem in tasks.problems("test", 200, seed=0):
        right = problem.response
        assert tasks.is_correct(problem, right)
        for at in range(len(right)):
            assert not tasks.is_correct(problem, right[:at] + right[at + 1 :])
            assert not tasks.is_correct(problem, right[:at] + "~" + right[at + 1 :])
        assert not tasks.is_correct(problem, right + " ")
        assert not tasks.is_correct(problem, "")
