"""An index of passages in a folder: BM25 by `bm25s`, and cosine of embeddings by `faiss`.

Knows passages (`title: text`), an index folder and queries. Does not know questions, agents or MCP.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, Protocol

import bm25s
import faiss
import numpy as np
from bm25s.stopwords import STOPWORDS_EN

Method = Literal["bm25", "dense"]
HASHED = "hashed"  # the encoder that needs no model
HASHED_WIDTH, ROWS = 256, 4096  # of a table of random numbers that words are made of
CHUNK = 4096  # passages that are encoded at once
BGE_QUERY = "Represent this sentence for searching relevant passages: "
STOPWORDS = frozenset(STOPWORDS_EN)
LONGEST = 64  # words of a query that count

Vectors = np.ndarray  # float32 [N, D], each row of length 1
Ranking = Callable[[str, int], list[tuple[int, float]]]


class Encoder(Protocol):
    """Texts as unit vectors. Some models want to be told which texts are queries."""

    def __call__(self, texts: list[str], *, query: bool = False) -> Vectors: ...


def words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if word not in STOPWORDS]


def whole(title: str) -> str:
    """A title as one word, so that a query for it finds it before longer titles that have its
    words."""
    return "_" + "_".join(re.findall(r"\w+", title.lower()))


# --- building ---


def cached_index(passages: Sequence[str], *, dense: str | None = None) -> Path:
    """The folder of an index of these passages, which is made where there is none.

    The folder's name follows from the passages and the encoder, so it never is out of date.
    Processes may call this side by side."""
    digest = hashlib.sha256(json.dumps([dense, *passages]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "agentlightning" / f"index-{digest}"
    if not folder.exists():
        build_index(passages, folder, dense=dense)
    return folder


def build_index(passages: Sequence[str], folder: Path, *, dense: str | None = None) -> None:
    """Write an index to a new folder; with `dense`, the name of an encoder, one of embeddings as
    well. The folder is whole as soon as it is there: of two processes, the first one's stays.

    ValueError if there are no passages."""
    if not passages:
        raise ValueError("there are no passages to make an index of")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as name:
        made = Path(name) / "index"
        index = bm25s.BM25()
        index.index([terms(passage) for passage in passages], show_progress=False)
        index.save(made, corpus=passages, show_progress=False)
        if dense is not None:
            write_dense(passages, dense, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def terms(passage: str) -> list[str]:
    return [*words(passage), whole(passage.partition(": ")[0])]


def write_dense(passages: Sequence[str], encoder: str, folder: Path) -> None:
    encode = make_encoder(encoder)
    index = faiss.IndexFlatIP(encode(["width"]).shape[1])
    for start in range(0, len(passages), CHUNK):
        index.add(encode(list(passages[start : start + CHUNK])))
    faiss.write_index(index, str(folder / "dense.faiss"))
    (folder / "dense.json").write_text(json.dumps({"encoder": encoder}), encoding="utf-8")


# --- encoders ---


def make_encoder(name: str) -> Encoder:
    """`hashed`, or the encoder in a Hugging Face repository or directory, such as
    `BAAI/bge-small-en-v1.5`."""
    return encode_hashed if name == HASHED else load_encoder(name)


def encode_hashed(texts: list[str], *, query: bool = False) -> Vectors:
    """Sums of word vectors. They know spelling and no meaning, and need no model."""
    summed = [
        np.sum([word_vector(word) for word in words(text)] or [word_vector("")], axis=0)
        for text in texts
    ]
    return np.stack(summed) / np.linalg.norm(summed, axis=1, keepdims=True)


@lru_cache(maxsize=100_000)
def word_vector(word: str) -> np.ndarray:
    """Half of it is the word's own, half is shared with words that have the same three letters in a
    row."""
    padded = f"<{word}>".encode()
    number = zlib.crc32(padded)
    trigrams = [
        zlib.crc32(padded[start : start + 3]) % ROWS for start in range(len(padded) - 2)
    ] or [0]
    own = random_rows()[[number % ROWS, number // ROWS % ROWS]].sum(axis=0) / 2**0.5
    return own + random_rows()[trigrams].sum(axis=0) / len(trigrams) ** 0.5


@cache
def random_rows() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, HASHED_WIDTH), np.float32)


def load_encoder(name: str) -> Encoder:
    """A transformer whose first token stands for the text, as in the BGE family, whose queries have
    a preface."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModel.from_pretrained(name).eval()
    preface = BGE_QUERY if "bge" in name.lower() else ""

    @torch.no_grad()
    def encode(texts: list[str], *, query: bool = False) -> Vectors:
        rows: list[np.ndarray] = []
        for start in range(0, len(texts), 64):
            batch = [preface * query + text for text in texts[start : start + 64]]
            inputs = tokenizer(
                batch, padding=True, truncation=True, max_length=512, return_tensors="pt"
            )
            first = model(**inputs).last_hidden_state[:, 0]
            rows.append(torch.nn.functional.normalize(first, dim=-1).numpy())
        return np.concatenate(rows)

    return encode


# --- searching ---


class Index:
    """An index in a folder. Only what a query touches is read from disk."""

    def __init__(self, folder: Path, method: Method = "bm25") -> None:
        """FileNotFoundError where the folder has no index for this method, ValueError where it is
        broken; both say what to do."""
        needed = "params.index.json" if method == "bm25" else "dense.json"
        if not (folder / needed).exists():
            raise FileNotFoundError(
                f"no {method} index in {folder}; delete the folder if it is there, and run train.py"
                + (" with --dense" if method == "dense" else "")
            )
        try:
            index = bm25s.BM25.load(
                folder, mmap=True, load_corpus=True, show_progress=False, verbosity=0
            )
            self.passages = index.corpus
            self.passages[len(self.passages) - 1]  # what a file that was cut off does not have
            index.corpus = None  # it ranks numbers
            self.ranked = bm25_ranking(index) if method == "bm25" else dense_ranking(folder)
        except Exception as error:  # bm25s and faiss raise many for a file that is cut off
            raise ValueError(
                f"the index in {folder} is broken ({error}); delete the folder and run train.py"
            ) from error

    def search(self, query: str, top: int = 1) -> list[str]:
        """The `top` passages that match best, the best first; fewer where no more have anything in
        common with it."""
        ranking = self.ranked(query, min(top, len(self.passages)))
        return [self.passages[number]["text"] for number, score in ranking if score > 0]


def answer(index: Index, query: str, top: int = 1, most: int | None = None) -> str:
    """A search as a tool answers it: the `top` passages, with `most` words of each."""
    if not query.strip():
        return "Error: the query is empty; search for a word or a description"
    found = index.search(query, top)
    return "\n\n".join(shorten(passage, most) for passage in found) or "nothing found"


def shorten(passage: str, most: int | None) -> str:
    kept = passage.split(" ")
    return passage if most is None or len(kept) <= most else " ".join(kept[:most]) + " …"


def bm25_ranking(index: bm25s.BM25) -> Ranking:
    def rank(query: str, top: int) -> list[tuple[int, float]]:
        # a query may begin with what it is about, as in `kind: big cat`
        title = whole(query.rpartition(": ")[2])
        given = [*words(query)[:LONGEST], title, title]  # for two, since others name it too
        asked = [word for word in given if word in index.vocab_dict]
        if not asked:
            return []
        numbers, scores = index.retrieve([asked], k=top, show_progress=False)
        return list(zip(numbers[0].tolist(), scores[0].tolist(), strict=True))

    return rank


def dense_ranking(folder: Path) -> Ranking:
    index = faiss.read_index(str(folder / "dense.faiss"), faiss.IO_FLAG_MMAP)
    encode = make_encoder(
        json.loads((folder / "dense.json").read_text(encoding="utf-8"))["encoder"]
    )

    def rank(query: str, top: int) -> list[tuple[int, float]]:
        scores, numbers = index.search(encode([query], query=True), top)
        return list(zip(numbers[0].tolist(), scores[0].tolist(), strict=True))

    return rank
