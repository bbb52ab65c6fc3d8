"""The bundled classifier: a linear model over hashed runs of characters, read with no library.

A text is looked at in stretches of a fixed number of characters, counted from its beginning, so
that a stream is judged as the whole is. How it was made, from what, and how often it is right:
`benchmarks/train_classifier.py` and docs/safety.md.
"""

import base64
import json
import math
import re
import zlib
from functools import cache
from pathlib import Path

from core.safety.policy import STRETCH_CHARS, Classifier
from core.safety.scanning import Run, Scanner

WEIGHTS = Path(__file__).parent / "weights"
GRAMS = (3, 4, 5)  # characters of a run

_SPACES = re.compile(r"\s+")


class LinearModel:
    """Weights by hash. `score` is a probability of the kind of text it was trained to know."""

    def __init__(self, weights: list[int], scale: float, bias: float) -> None:
        self._weights = weights
        self._scale = scale
        self._bias = bias

    @classmethod
    def read(cls, text: str) -> "LinearModel":
        """From the file that training wrote."""
        told = json.loads(text)
        weights = [byte - 128 for byte in zlib.decompress(base64.b64decode(told["weights"]))]
        return cls(weights, told["scale"], told["bias"])

    def score(self, text: str) -> float:
        """From 0 to 1."""
        found = features(text, len(self._weights))
        if not found:
            return 0.0
        total = sum([self._weights[at] for at in found]) * self._scale
        return 1 / (1 + math.exp(-(total / math.sqrt(len(found)) + self._bias)))


@cache
def bundled(name: str) -> LinearModel:
    """The model of this name."""
    return LinearModel.read((WEIGHTS / f"{name}.json").read_text(encoding="ascii"))


def classify(detector: Classifier, rule: int) -> "ClassifierScanner":
    """For one text."""
    return ClassifierScanner(bundled(detector.model), detector.threshold, rule)


def features(text: str, size: int) -> set[int]:
    """The hashes of a text's runs of characters, without case and with spaces made one."""
    plain = f" {_SPACES.sub(' ', text.lower()).strip()} "
    hashed: set[int] = set()
    for length in GRAMS:
        for at in range(len(plain) - length + 1):
            hashed.add(zlib.crc32(plain[at : at + length].encode("utf-8", "replace")) % size)
    return hashed


class ClassifierScanner(Scanner):
    """One text, as rule number `rule`: a stretch is a match, or it is none."""

    def __init__(self, model: LinearModel, threshold: float, rule: int) -> None:
        self._model = model
        self._threshold = threshold
        self._rule = rule
        self._left = ""

    def feed(self, text: str, *, final: bool) -> list[Run]:
        """See `Scanner`."""
        self._left += text
        runs: list[Run] = []
        while len(self._left) >= STRETCH_CHARS or (final and self._left):
            stretch, self._left = self._left[:STRETCH_CHARS], self._left[STRETCH_CHARS:]
            end = self.decided + len(stretch)
            if self._model.score(stretch) >= self._threshold:
                runs.append(Run(self.decided, end, self._rule))
            self.decided = end
        return runs
