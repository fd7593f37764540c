"""Questions over WordNet that take two to four searches; or the real MuSiQue.

A question names a word, or describes it by its gloss, and the relations to follow from it, the last
one first: `kind of group of word: lion`. A word's passage names what it is related to, and nothing
of what follows from there, so each search can only tell what to search for next.

A task is a plain JSON object: `id`, `kind` (`2 hops`), `question`, `answers` (any of them is
right), and of WordNet also `path`, the titles of the passages that tell the answer, and `start` and
`relations`, which only demonstrations use. The split is by passage: none that a held-out question
needs is one that a training question needs."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path

from wordnet import Synset, passages, wordnet

HOPS = (2, 3, 4)
HELDOUT_SHARE = 3  # every third passage is for held-out questions
LEAST = 5  # occurrences in the corpus of each word of a name
NAME_WORDS = 2
DESCRIBED = 0.3  # the share of questions that describe their word, where its gloss is short
GLOSS_WORDS = range(5, 10)

MUSIQUE = "musique_ans_v1.0_{}.jsonl"
MISSING = (
    "there is no {path}; MuSiQue's download_data.sh (github.com/StonyBrookNLP/musique) fetches "
    "it. Without --musique the example asks questions over WordNet"
)


@cache
def clear() -> dict[str, Synset]:
    """The nouns that questions are about, by key: names of one meaning, of one or two words that
    are not rare."""
    senses = Counter(
        name.lower() for synset in wordnet().values() for name in dict.fromkeys(synset.names)
    )
    frequency = Counter(chain.from_iterable(re.findall("[A-Za-z]+", one) for one in passages()))
    found: dict[str, Synset] = {}
    for key, synset in wordnet().items():
        name = synset.names[0]
        spelled = name.split(" ")
        if (
            key.startswith("n")
            and senses[name.lower()] == 1
            and len(spelled) <= NAME_WORDS
            and min(frequency[word] for word in spelled) >= LEAST
        ):
            found[key] = synset
    return found


def ways(key: str, hops: int, *, heldout: bool) -> Iterator[tuple[tuple[str, str], ...]]:
    """All ways of so many hops from a synset, as pairs of a relation and the key it leads to.

    A relation that leads to several synsets is not followed, nor is a passage of the other side of
    the split."""
    if is_heldout(clear()[key].names[0]) != heldout:
        return
    for relation, keys in clear()[key].related.items():
        if len(keys) == 1 and keys[0] in clear():
            step = (relation, keys[0])
            if hops == 1:
                yield (step,)
            else:
                for rest in ways(keys[0], hops - 1, heldout=heldout):
                    yield (step, *rest)


def is_heldout(title: str) -> bool:
    """The side of the split that a passage is on: the same in every process."""
    return zlib.crc32(title.encode()) % HELDOUT_SHARE == 0


def make_task(key: str, way: tuple[tuple[str, str], ...], generator: random.Random) -> dict:
    """The question that follows `way` from a synset."""
    synsets = [clear()[one] for one in (key, *(to for _, to in way))]
    relations = [relation for relation, _ in way]
    start = f"word: {synsets[0].names[0]}"
    description = synsets[0].gloss.partition(";")[0]
    if len(description.split()) in GLOSS_WORDS and generator.random() < DESCRIBED:
        start = f"thing: {description}"
    return {
        "id": "/".join((key, *relations)),
        "kind": f"{len(way)} hops",
        "question": " of ".join((*reversed(relations), start)),
        "answers": list(synsets[-1].names),
        "path": [synset.names[0] for synset in synsets[:-1]],
        "start": start,
        "relations": relations,
    }


def draw(n: int, generator: random.Random, *, heldout: bool) -> list[dict]:
    """`n` questions whose numbers of hops take turns, and among these the relations that are
    followed; none twice before all were drawn."""
    orders = [in_turn(hops, generator, heldout=heldout) for hops in HOPS]
    return [make_task(*next(orders[number % len(HOPS)]), generator) for number in range(n)]


def in_turn(
    hops: int, generator: random.Random, *, heldout: bool
) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Keys and ways from there, again and again."""
    groups: dict[tuple[str, ...], list] = {}
    for key in clear():
        for way in ways(key, hops, heldout=heldout):
            groups.setdefault(tuple(relation for relation, _ in way), []).append((key, way))
    while True:
        orders = [generator.sample(group, len(group)) for group in groups.values()]
        for row in zip_longest(*orders):
            there = [one for one in row if one is not None]
            yield from generator.sample(there, len(there))


def train_tasks(n: int, seed: int) -> list[dict]:
    """`n` training questions; the same seed gives the same list."""
    return draw(n, random.Random(f"train/{seed}"), heldout=False)


def heldout_tasks(n: int) -> list[dict]:
    """The first `n` held-out questions: no training question needs a passage that they need."""
    return draw(n, random.Random("heldout"), heldout=True)


def load_musique(folder: Path, split: str) -> tuple[list[dict], list[str]]:
    """The questions of `train` or `dev` as MuSiQue ships them, and the passages they are about,
    each once.

    A question that MuSiQue marks as unanswerable is left out. FileNotFoundError where the file is
    missing, ValueError for a line that is no question; both say what to do."""
    path = folder / MUSIQUE.format(split)
    if not path.is_file():
        raise FileNotFoundError(MISSING.format(path=path))
    tasks: list[dict] = []
    found: dict[str, None] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                texts = [f"{one['title']}: {one['paragraph_text']}" for one in entry["paragraphs"]]
                if entry.get("answerable", True):
                    tasks.append(musique_task(entry))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a question as MuSiQue ships them ({error!r}); a "
                    "line is an object with id, question, answer, answer_aliases and paragraphs "
                    "(title, paragraph_text, is_supporting)"
                ) from None
            found.update(dict.fromkeys(texts))
    return tasks, list(found)


def musique_task(entry: dict) -> dict:
    """One line of MuSiQue as a task; its hops are the paragraphs that support the answer."""
    hops = sum(bool(one["is_supporting"]) for one in entry["paragraphs"])
    return {
        "id": str(entry["id"]),
        "kind": f"{hops} hops",
        "question": str(entry["question"]),
        "answers": [str(entry["answer"]), *map(str, entry["answer_aliases"])],
    }


def load(musique: Path | None, seed: int) -> tuple[list[dict], list[dict], list[str]]:
    """Training questions, held-out ones, and the passages: of MuSiQue in that folder, or of
    WordNet."""
    if musique is None:
        return train_tasks(3000, seed), heldout_tasks(120), passages()
    (train, texts), (dev, more) = load_musique(musique, "train"), load_musique(musique, "dev")
    return train, dev[:500], list(dict.fromkeys([*texts, *more]))
