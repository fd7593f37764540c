"""A small world of facts, one passage each, and questions that follow two to four of them; or the
real MuSiQue.

    film → artist → town → official → group

Every entity of a kind has three relations, each to an entity of the next:
`film Arko director: artist Belmo`. A question names one entity and the relations to follow from it,
the last one first: `home of director of film Arko`. No passage has both the entity and the answer,
so each search can only tell what to search for next.

A task is a plain JSON object: `id`, `kind` (`2 hops`), `question`, `answers` (any of them is
right), and here also `entity` and `relations`, which only demonstrations use. The split is by
entity and first relation: a held-out question begins with a fact that no training question begins
with."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

RELATIONS = {
    "film": ("director", "writer", "star"),  # an artist
    "artist": ("birthplace", "home", "school"),  # a town
    "town": ("mayor", "founder", "patron"),  # an official
    "official": ("party", "club", "church"),  # a group
}
HOPS = (2, 3, 4)
KINDS = tuple(f"{hops} hops" for hops in HOPS)
ENTITIES = 32  # of each kind
HELDOUT_SHARE = 6  # one combination of entity and first relation in six is never trained on
BEGINNINGS = [
    "Ar",
    "Bel",
    "Cor",
    "Dan",
    "El",
    "Fal",
    "Gor",
    "Hal",
    "Is",
    "Jor",
    "Kel",
    "Lor",
    "Mar",
    "Nor",
    "Or",
    "Per",
]
ENDINGS = ["a", "din", "eth", "ic", "ko", "mo", "nas", "o", "run", "sa", "tis", "va"]

MUSIQUE = "musique_ans_v1.0_{}.jsonl"
MISSING = (
    "there is no {path}; MuSiQue's download_data.sh (github.com/StonyBrookNLP/musique) fetches "
    "it. Without --musique the example makes a world of its own, with questions of two to four "
    "hops"
)


@cache
def entities() -> tuple[tuple[str, ...], ...]:
    """The entities of the five kinds, film to group, such as `film Arko`; no name occurs twice."""
    every = [beginning + ending for beginning, ending in itertools.product(BEGINNINGS, ENDINGS)]
    drawn = iter(random.Random("names").sample(every, ENTITIES * (len(RELATIONS) + 1)))
    return tuple(
        tuple(f"{kind} {next(drawn)}" for _ in range(ENTITIES)) for kind in (*RELATIONS, "group")
    )


@cache
def facts() -> dict[tuple[str, str], str]:
    """(entity, relation) → entity; the same in every process."""
    generator = random.Random("facts")
    levels = zip(RELATIONS.values(), entities(), entities()[1:], strict=False)
    return {
        (entity, relation): generator.choice(values)
        for relations, named, values in levels
        for entity in named
        for relation in relations
    }


def passages() -> list[str]:
    """The corpus, a passage for each fact, in random order."""
    written = [f"{entity} {relation}: {value}" for (entity, relation), value in facts().items()]
    return random.Random("passages").sample(written, len(written))


def make_task(entity: str, relations: tuple[str, ...]) -> dict:
    """The question that follows `relations` from `entity`, one after another."""
    answer = entity
    for relation in relations:
        answer = facts()[answer, relation]
    return {
        "id": "/".join((entity, *relations)),
        "kind": f"{len(relations)} hops",
        "question": " of ".join((*reversed(relations), entity)),
        "answers": [answer.split()[1]],
        "entity": entity,
        "relations": list(relations),
    }


def is_heldout(entity: str, relation: str) -> bool:
    """Which side of the split a first fact is on: the same in every process and on every
    machine."""
    digest = hashlib.sha256(f"{entity}/{relation}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELDOUT_SHARE == 0


def all_tasks(*, heldout: bool) -> Iterator[dict]:
    """Every question of one side of the split."""
    for hops in HOPS:
        for level in range(len(RELATIONS) - hops + 1):
            for entity in entities()[level]:
                for relations in itertools.product(*list(RELATIONS.values())[level : level + hops]):
                    if is_heldout(entity, relations[0]) == heldout:
                        yield make_task(entity, relations)


def draw(n: int, generator: random.Random, *, heldout: bool) -> list[dict]:
    """`n` questions whose numbers of hops take turns, each trio in random order; every number's own
    come before any is repeated."""
    every = list(all_tasks(heldout=heldout))
    orders = {
        kind: shuffled([task for task in every if task["kind"] == kind], generator)
        for kind in KINDS
    }
    kinds: list[str] = []
    while len(kinds) < n:
        kinds += generator.sample(KINDS, len(KINDS))
    return [next(orders[kind]) for kind in kinds[:n]]


def shuffled(tasks: list[dict], generator: random.Random) -> Iterator[dict]:
    """The tasks in random order, again and again."""
    while True:
        yield from generator.sample(tasks, len(tasks))


def train_tasks(n: int, seed: int) -> list[dict]:
    """`n` training questions; the same seed gives the same list."""
    return draw(n, random.Random(f"train/{seed}"), heldout=False)


def heldout_tasks(n: int) -> list[dict]:
    """The first `n` held-out questions: no training question begins with the same fact."""
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
    """Training questions, held-out ones, and the passages: of MuSiQue in that folder, or of the
    world made here."""
    if musique is None:
        return train_tasks(3000, seed), heldout_tasks(120), passages()
    (train, texts), (dev, more) = load_musique(musique, "train"), load_musique(musique, "dev")
    return train, dev[:500], list(dict.fromkeys([*texts, *more]))
