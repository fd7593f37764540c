"""An index of passages on disk: BM25 by `bm25s`, and cosine of embeddings by `faiss`, from a stream
of any length.

Knows passages (a text each), an index folder and queries. Does not know questions, agents or MCP.
Passages are read one after another and stay on disk; what grows in memory with them is about 25
bytes per word while an index is built.

    python retriever.py PASSAGES.jsonl INDEX [--dense hashed|BAAI/bge-small-en-v1.5]

A line of PASSAGES.jsonl is an object with `text`, and `title` if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, Protocol

import bm25s
import faiss
import numpy as np
from bm25s.stopwords import STOPWORDS_EN
from bm25s.tokenization import Tokenized

Method = Literal["bm25", "dense"]
HASHED = "hashed"  # the encoder that needs no model
HASHED_WIDTH, ROWS = 256, 4096  # of a table of random numbers that words are made of
CHUNK = 4096  # passages that are encoded at once
EXHAUSTIVE = 50_000  # up to so many passages, each is compared with the query
CLUSTERS, PROBED = 1024, 24  # beyond, those of the nearest clusters are
BGE_QUERY = "Represent this sentence for searching relevant passages: "

Vectors = np.ndarray  # float32 [N, D], each row of length 1


class Encoder(Protocol):
    """Texts as unit vectors. Some models want to be told which texts are queries."""

    def __call__(self, texts: list[str], *, query: bool = False) -> Vectors: ...


def words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if word not in STOPWORDS]


STOPWORDS = frozenset(STOPWORDS_EN)


# --- passages ---


class Passages:
    """Texts in a file, found by number, by any number of threads: nothing of them is kept in
    memory."""

    def __init__(self, folder: Path) -> None:
        with (folder / "passages.jsonl").open("rb") as file:
            self.lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.starts = np.load(folder / "starts.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> str:
        return json.loads(self.lines[self.starts[number] : self.starts[number + 1]])

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))


class TokenIds:
    """The word ids of all passages, read from disk passage by passage as often as `bm25s` asks for
    them."""

    def __init__(self, file: Path, ends: np.ndarray) -> None:
        self.flat, self.ends = np.memmap(file, np.int32, mode="r"), ends

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for end in self.ends.tolist():
            yield self.flat[start:end].tolist()
            start = end


# --- building ---


def build_index(texts: Iterable[str], folder: Path, *, dense: str | None = None) -> None:
    """Write an index of `texts` to `folder`; with `dense`, the name of an encoder, one of
    embeddings as well.

    ValueError if there are no texts."""
    folder.mkdir(parents=True, exist_ok=True)
    write_bm25(texts, folder)
    (folder / "dense.json").unlink(missing_ok=True)
    if dense is not None:
        write_dense(Passages(folder), make_encoder(dense), folder)
        (folder / "dense.json").write_text(json.dumps({"encoder": dense}), encoding="utf-8")


def write_bm25(texts: Iterable[str], folder: Path) -> None:
    """One pass over the texts writes them, where they begin, and their word ids; `bm25s` makes its
    matrix of these."""
    vocabulary: dict[str, int] = {"": 0}  # the word of a text without words
    starts, ends = [0], [0]
    flat = folder / "words.int32"
    with (folder / "passages.jsonl").open("wb") as passages, flat.open("wb") as ids:
        for text in texts:
            starts.append(
                starts[-1] + passages.write(json.dumps(text, ensure_ascii=False).encode() + b"\n")
            )
            numbered = [vocabulary.setdefault(word, len(vocabulary)) for word in words(text)] or [0]
            ids.write(np.array(numbered, np.int32).tobytes())
            ends.append(ends[-1] + len(numbered))
    if len(ends) == 1:
        raise ValueError("there are no passages to make an index of")
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    index = bm25s.BM25()
    index.index(Tokenized(TokenIds(flat, np.array(ends[1:])), vocabulary), show_progress=False)  # type: ignore
    index.save(folder / "bm25", show_progress=False)
    flat.unlink()


def write_dense(passages: Passages, encode: Encoder, folder: Path) -> None:
    """Embeddings of all passages, chunk by chunk, with two bytes per number where there are
    many."""
    width = encode(["width"]).shape[1]
    if len(passages) <= EXHAUSTIVE:
        index = faiss.IndexFlatIP(width)
    else:
        index = faiss.index_factory(width, f"IVF{CLUSTERS},SQfp16", faiss.METRIC_INNER_PRODUCT)
        sample = np.random.default_rng(0).choice(len(passages), 40 * CLUSTERS, replace=False)
        index.train(
            np.concatenate(
                [encode(chunk) for chunk in chunks(passages[int(one)] for one in sample)]
            )
        )
    for chunk in chunks(passages):
        index.add(encode(chunk))
    faiss.write_index(index, str(folder / "dense.faiss"))


def chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while chunk := list(itertools.islice(texts, CHUNK)):
        yield chunk


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
        """FileNotFoundError where the folder has no index for this method, which says how to make
        it."""
        needed = folder / ("bm25" if method == "bm25" else "dense.json")
        if not needed.exists():
            how = f"python retriever.py PASSAGES.jsonl {folder}" + (
                " --dense hashed" if method == "dense" else ""
            )
            raise FileNotFoundError(f"no {method} index in {folder}; make one with: {how}")
        self.passages = Passages(folder)
        self.ranked: Callable[[str, int], list[tuple[int, float]]] = (
            bm25_ranking(folder) if method == "bm25" else dense_ranking(folder)
        )

    def search(self, query: str, top: int = 1) -> list[str]:
        """The `top` passages that match best, the best first; fewer where no more have anything in
        common with it."""
        ranking = self.ranked(query, min(top, len(self.passages)))
        return [self.passages[number] for number, score in ranking if number >= 0 and score > 0]


def bm25_ranking(folder: Path) -> Callable[[str, int], list[tuple[int, float]]]:
    index = bm25s.BM25.load(folder / "bm25", mmap=True, show_progress=False)

    def rank(query: str, top: int) -> list[tuple[int, float]]:
        if not (asked := words(query)):
            return []
        numbers, scores = index.retrieve([asked], k=top, show_progress=False)
        return list(zip(numbers[0].tolist(), scores[0].tolist(), strict=True))

    return rank


def dense_ranking(folder: Path) -> Callable[[str, int], list[tuple[int, float]]]:
    index = faiss.read_index(str(folder / "dense.faiss"), faiss.IO_FLAG_MMAP)
    if hasattr(index, "nprobe"):
        index.nprobe = PROBED
    encode = make_encoder(
        json.loads((folder / "dense.json").read_text(encoding="utf-8"))["encoder"]
    )

    def rank(query: str, top: int) -> list[tuple[int, float]]:
        scores, numbers = index.search(encode([query], query=True), top)
        return list(zip(numbers[0].tolist(), scores[0].tolist(), strict=True))

    return rank


# --- the command ---


def read_passages(file: Path) -> Iterator[str]:
    """ValueError for a line that is no passage, with its number."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                yield f"{entry['title']}: {entry['text']}" if entry.get("title") else entry["text"]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{file}, line {number}: a passage is an object with text, and title if any"
                ) from None


def main() -> None:
    parser = argparse.ArgumentParser(description="Make an index of passages.")
    parser.add_argument(
        "passages", type=Path, help="JSONL: objects with text, and title if there is one"
    )
    parser.add_argument("index", type=Path, help="the folder to write")
    parser.add_argument(
        "--dense", metavar="ENCODER", help="embeddings as well: hashed, or a Hugging Face id"
    )
    options = parser.parse_args()
    try:
        build_index(read_passages(options.passages), options.index, dense=options.dense)
    except (OSError, ValueError) as error:
        sys.exit(f"retriever.py: {error}")


if __name__ == "__main__":
    main()
