"""Data: what is read is what lies in the files, and who lacks them is told how to get
them.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from gradwire_bench.workloads import fashion_mnist
from papers.workloads import movielens as _movielens
from papers.workloads import words as _words
from papers.workloads.applications import movielens_deepfm

RATINGS = "1\t2\t5\t30\n1\t1\t3\t10\n2\t3\t4\t5\n1\t3\t1\t20\n2\t1\t2\t4\n"
USERS = "1|24|M|writer|85711\n2|53|F|other|T8H1N\n"
ITEMS = (
    "1|Toy Story (1995)|01-Jan-1995||url|0|0|0|1|1|1|0|0|0|0|0|0|0|0|0|0|0|0|0\n"
    "2|GoldenEye (1963)|01-Jan-1963||url|0|1|1|0|0|0|0|0|0|0|0|0|0|0|0|0|1|0|0\n"
    "3|unknown|||url|1|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0\n"
)


@pytest.fixture
def movielens(tmp_path: Path) -> Path:
    for name, text in (("u.data", RATINGS), ("u.user", USERS), ("u.item", ITEMS)):
        (tmp_path / name).write_text(text, encoding="latin-1")
    return tmp_path


def test_ratings_come_by_user_and_time(movielens: Path) -> None:
    data = _movielens.load(movielens)
    assert data.users_N.tolist() == [0, 0, 0, 1, 1]
    assert data.items_N.tolist() == [0, 2, 1, 0, 2]
    assert data.ratings_N.tolist() == [3, 1, 5, 2, 4]
    assert data.times_N.tolist() == [10, 20, 30, 4, 5]
    # Groups of age, sexes, occupations by name, first digits of postal codes (10:
    # none).
    assert data.user_fields_UF.tolist() == [[1, 0, 1, 8], [5, 1, 0, 10]]
    assert data.item_fields_IF.tolist() == [[3, 8], [1, 5], [0, 0]]


def test_a_click_is_a_rating_of_four_or_five(movielens: Path) -> None:
    task = movielens_deepfm(batch=50, folder=movielens)
    categories, clicks = task.batch(0, 0, 1)
    liked = {(0, 1), (1, 2)}
    for row, click in zip(categories.tolist(), clicks.tolist(), strict=True):
        assert click == float((row[0], row[1]) in liked)
        genre, job = row[6], row[4]
        assert row[8:] == [row[0] * 19 + genre, row[1] * 21 + job]


def images(folder: Path, part: str, count: int) -> None:
    pixels = bytes(range(256)) * 4 * count
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz", "wb") as file:
        file.write(bytes(16) + pixels[: count * 784])
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
        file.write(bytes(8) + bytes(range(count)))


@pytest.mark.smoke
def test_idx_files_are_read_behind_their_headers(tmp_path: Path) -> None:
    images(tmp_path, "train", 3)
    images(tmp_path, "t10k", 2)
    train, test = fashion_mnist.load(tmp_path)
    assert train.images_NCHW.shape == (3, 1, 28, 28)
    assert train.images_NCHW.flatten()[:3].tolist() == [0, 1, 2]
    assert train.labels_N.tolist() == [0, 1, 2]
    assert len(test.labels_N) == 2


def test_held_out_words_are_no_training_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"w{number}" for number in range(20_000))
    monkeypatch.setattr(_words, "sources", lambda max_bytes: text)
    words = _words.load.__wrapped__(vocabulary=30_000, max_bytes=1)
    assert not set(words.train_N.tolist()) & set(words.held_out_N.tolist())
    assert words.held_out_N.numel() == 2000
