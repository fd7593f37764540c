"""The reward of an answer: 0.9 · how much of it is right + 0.1 · whether it has the form that was
asked for.

Answers are compared as SQuAD and MuSiQue compare them (`agentlightning.rewards`): lower case,
without punctuation and articles, word by word, against the best of several right answers. One thing
differs. F1 pays for hedging: of two equally likely names, giving both earns 2/3 each time, giving
one earns 1/2. So an answer longer than the right one is worth its precision, which is never more
than F1: whoever lists candidates then earns what the likeliest of them would alone. An answer no
longer than the right one earns exactly F1."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from agentlightning.rewards import normalize_answer, token_f1

ANSWER_WEIGHT, FORM_WEIGHT = 0.9, 0.1
MARK = re.compile(r"\banswer *(?:\([^()\n]*\) *)?:", re.IGNORECASE)
LONGEST = 30  # words


def extract(text: str) -> str | None:
    """What follows `answer:`, or `answer (what it is):`, with which the last line begins. None
    where the mark is missing or occurs twice, nothing follows it that counts as a word, or too
    much."""
    *_, last = text.strip().split("\n")
    mark = MARK.match(last)
    if mark is None or len(MARK.findall(text)) > 1:
        return None
    answer = last[mark.end() :].strip()
    return answer if normalize_answer(answer) and len(answer.split()) <= LONGEST else None


def correctness(answer: str, right: str) -> float:
    """The smaller of F1 and precision, of an answer with words: a list is worth no more than its
    likeliest member."""
    given, wanted = (
        Counter(normalize_answer(answer).split()),
        Counter(normalize_answer(right).split()),
    )
    return min(token_f1(answer, right), (given & wanted).total() / given.total())


def grade(text: str, answers: Sequence[str]) -> float:
    """The reward of the agent's last message, in [0, 1]; text without the form earns nothing,
    whatever it mentions."""
    answer = extract(text)
    if answer is None:
        return 0.0
    return ANSWER_WEIGHT * max(correctness(answer, right) for right in answers) + FORM_WEIGHT


def recall(results: Sequence[str], titles: Sequence[str]) -> float:
    """The share of the passages with these titles that are among the results of searches."""
    found = {passage.partition(": ")[0] for result in results for passage in result.split("\n\n")}
    return sum(title in found for title in titles) / len(titles)
