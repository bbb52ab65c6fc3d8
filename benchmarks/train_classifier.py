"""Trains the bundled classifier of prompt injections, and says how often it is right.

    python -m benchmarks.train_classifier            # prints; --write replaces the weights

The corpus is the one below, written for this: sentences that try to take over a model's
instructions, and such that do not, many of them about the same things. Whole sentences are held
out, never other wordings of one that was trained on. It is small: the figures are of sentences
like these, and no promise about an adversary's.
"""

import base64
import json
import random
import sys
import zlib
from pathlib import Path

import numpy as np

from gateway.safety.classifier import WEIGHTS, LinearModel, features

SIZE = 8_192
EPOCHS = 300
RATE = 0.5
DECAY = 1e-4
HELD_OUT = 0.25
SEED = 7
THRESHOLD = 0.9

CORPUS = Path(__file__).parent / "classifier_corpus.json"

BEFORE = ("", "Hi! ", "Please read this. ", "URGENT: ", "By the way, ", "Summarise this page: ")
AFTER = ("", " Thanks.", " Do it now.", " This is important.")


def wordings(sentence: str, random_: random.Random) -> list[str]:
    """A sentence as it is, and in some surroundings."""
    made = {sentence}
    for _ in range(3):
        made.add(random_.choice(BEFORE) + sentence + random_.choice(AFTER))
    return sorted(made | {sentence.upper()})


def split(sentences: list[str], random_: random.Random) -> tuple[list[str], list[str]]:
    """To train on, and to hold out."""
    shuffled = sorted(sentences)
    random_.shuffle(shuffled)
    cut = int(len(shuffled) * HELD_OUT)
    return shuffled[cut:], shuffled[:cut]


def matrix(texts: list[str]) -> np.ndarray:
    """One row for each text, as `LinearModel.score` sees it."""
    rows = np.zeros((len(texts), SIZE), dtype=np.float32)
    for row, text in zip(rows, texts, strict=True):
        found = sorted(features(text, SIZE))
        row[found] = 1 / np.sqrt(len(found))
    return rows


def train(texts: list[str], labels: list[int]) -> tuple[np.ndarray, float]:
    """Logistic regression by gradient descent; both kinds weigh the same."""
    rows, wanted = matrix(texts), np.array(labels, dtype=np.float32)
    each = np.where(wanted == 1, 0.5 / wanted.sum(), 0.5 / (1 - wanted).sum())
    weights, bias = np.zeros(SIZE, dtype=np.float32), 0.0
    for _ in range(EPOCHS):
        guess = 1 / (1 + np.exp(-(rows @ weights + bias)))
        error = (guess - wanted) * each
        weights -= RATE * 20 * (rows.T @ error + DECAY / 20 * weights)
        bias -= RATE * 20 * float(error.sum())
    return weights, bias


def packed(weights: np.ndarray, bias: float) -> str:
    """The file: a byte for each weight."""
    scale = float(np.abs(weights).max()) / 127
    whole = np.rint(weights / scale).astype(np.int16) + 128
    bytes_ = zlib.compress(whole.astype(np.uint8).tobytes(), 9)
    told = {
        "weights": base64.b64encode(bytes_).decode(),
        "scale": round(scale, 8),
        "bias": round(bias, 6),
    }
    return json.dumps(told) + "\n"


def figures(model: LinearModel, attacks: list[str], plain: list[str]) -> dict[str, float | int]:
    """On what was held out, at the threshold that policies have by default."""
    caught = sum(model.score(text) >= THRESHOLD for text in attacks)
    alarmed = sum(model.score(text) >= THRESHOLD for text in plain)
    likelier = sum(model.score(text) >= 0.5 for text in attacks)
    quiet = sum(model.score(text) < 0.5 for text in plain)
    return {
        "attacks": len(attacks),
        "plain": len(plain),
        "recall_at_0.9": round(caught / len(attacks), 3),
        "false_alarms_at_0.9": round(alarmed / len(plain), 3),
        "accuracy_at_0.5": round((likelier + quiet) / (len(attacks) + len(plain)), 3),
    }


def main() -> None:
    random_ = random.Random(SEED)  # noqa: S311 - a seed makes it the same each time
    corpus = json.loads(CORPUS.read_text())
    attacks, held_attacks = split(corpus["attacks"], random_)
    plain, held_plain = split(corpus["plain"], random_)
    texts, labels = [], []
    for label, sentences in ((1, attacks), (0, plain)):
        for sentence in sentences:
            for wording in wordings(sentence, random_):
                texts.append(wording)
                labels.append(label)
    weights, bias = train(texts, labels)
    file = packed(weights, bias)
    told = {"trained_on": len(texts), **figures(LinearModel.read(file), held_attacks, held_plain)}
    print(json.dumps(told))
    if "--write" in sys.argv:
        WEIGHTS.mkdir(exist_ok=True)
        (WEIGHTS / "prompt-injection.json").write_text(file)


if __name__ == "__main__":
    main()
