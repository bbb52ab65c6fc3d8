"""A policy made ready to search with, or refused with the reason and the rule at fault.

    policy ─► rulebook ─┬─ scanners of a stage that act on the text: they hold it back
                        └─ scanners that only log: they hold nothing back

A rulebook is immutable but for the automata's memory, and shared by all texts of a gateway.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from core.safety.folding import fold
from core.safety.nfa import measure
from core.safety.patterns import PatternBook, PatternScanner
from core.safety.pii import SHAPES
from core.safety.policy import (
    PII,
    STRETCH_CHARS,
    Classifier,
    Judge,
    Pattern,
    Policy,
    Rule,
    Stage,
    Terms,
)
from core.safety.scanning import Scanner
from core.safety.syntax import PatternError, parse
from core.safety.terms import TermBook, TermScanner

TERM_CHARS_MAX = 200_000  # of all terms of a policy
STATES_MAX = 8_000  # of all patterns of a policy
JUDGES_MAX = 4

MakeScanner = Callable[[], Scanner]
Classify = Callable[[Classifier, int], Scanner]


class PolicyError(ValueError):
    """This policy cannot be kept to. `param` names the place in it."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(why)
        self.param = param


class Searches(NamedTuple):
    """Of one stage. Those of `acting` hold text back; `logging` ones do not."""

    acting: tuple[MakeScanner, ...] = ()
    logging: tuple[MakeScanner, ...] = ()
    hold_chars: int = 0  # the most that a stream is behind, characters that show nothing aside
    judges: tuple[int, ...] = ()  # rules, by number

    def __bool__(self) -> bool:
        return bool(self.acting or self.logging or self.judges)


class Rulebook:
    """Of one version of a policy. Raises PolicyError.

    `classify` makes a classifier's scanner; who only checks a policy has none.
    """

    def __init__(self, policy: Policy, classify: Classify | None = None) -> None:
        self.rules = policy.rules
        self._classify = classify
        _check_names(policy)
        _check_sizes(policy)
        self.input = self._searches("input")
        self.output = self._searches("output")

    @property
    def hold_chars(self) -> int:
        """How far a stream is behind at most, characters that show nothing aside."""
        return self.output.hold_chars

    def _searches(self, stage: Stage) -> Searches:
        numbers = [n for n, rule in enumerate(self.rules) if stage in rule.stages]
        acting, hold = self._scanners([n for n in numbers if self.rules[n].action != "log"])
        logging, _ = self._scanners([n for n in numbers if self.rules[n].action == "log"])
        return Searches(
            acting=acting,
            logging=logging,
            hold_chars=hold,
            judges=tuple(n for n in numbers if isinstance(self.rules[n].detector, Judge)),
        )

    def _scanners(self, numbers: Sequence[int]) -> tuple[tuple[MakeScanner, ...], int]:
        """And how far they hold a text back."""
        makers: list[MakeScanner] = []
        patterns = PatternBook()
        hold = 0
        for number in numbers:
            rule = self.rules[number]
            match rule.detector:
                case Terms(terms=terms, whole_word=whole_word):
                    book = TermBook(terms, whole_word=whole_word)
                    makers.append(partial(TermScanner, book, number))
                    hold = max(hold, book.length_max - (not whole_word))
                case Pattern() | PII():
                    hold = max(hold, _add_patterns(patterns, number, rule))
                case Classifier() as detector:
                    hold = max(hold, STRETCH_CHARS)
                    if self._classify is not None:
                        makers.append(partial(self._classify, detector, number))
                case _:
                    pass
        if patterns.rules:
            makers.append(partial(PatternScanner, patterns))
        return tuple(makers), hold


def _add_patterns(book: PatternBook, number: int, rule: Rule) -> int:
    """Returns the length of the longest match."""
    longest = 0
    try:
        if isinstance(rule.detector, Pattern):
            nodes = parse(rule.detector.pattern, ignore_case=rule.detector.ignore_case)
            book.add(number, [nodes])
            longest = measure(nodes)[2]
        else:
            assert isinstance(rule.detector, PII)
            for kind in rule.detector.kinds:
                for shape in SHAPES[kind]:
                    book.add(number, shape.nodes(), shape.check)
                    longest = max([longest, *(measure(each)[2] for each in shape.nodes())])
    except PatternError as error:
        raise PolicyError(f"rules[{number}].detector.pattern", str(error)) from error
    if book.states > STATES_MAX:
        why = f"the patterns up to here need {book.states} states, and may have {STATES_MAX}"
        raise PolicyError(f"rules[{number}].detector", why)
    return longest


def _check_names(policy: Policy) -> None:
    seen: set[str] = set()
    for number, rule in enumerate(policy.rules):
        if rule.name in seen:
            raise PolicyError(f"rules[{number}].name", f"two rules are named {rule.name!r}")
        seen.add(rule.name)
        if len(set(rule.stages)) != len(rule.stages):
            raise PolicyError(f"rules[{number}].stages", "a stage is named twice")


def _check_sizes(policy: Policy) -> None:
    chars = 0
    judges = 0
    for number, rule in enumerate(policy.rules):
        judges += isinstance(rule.detector, Judge)
        if isinstance(rule.detector, Judge) and rule.action == "mask":
            why = "a judge speaks of a whole text: it can log, block or end, and not mask"
            raise PolicyError(f"rules[{number}].action", why)
        if judges > JUDGES_MAX:
            why = f"a policy may have {JUDGES_MAX} judges: each is a request more"
            raise PolicyError(f"rules[{number}].detector", why)
        if isinstance(rule.detector, Terms):
            for at, term in enumerate(rule.detector.terms):
                chars += _term_chars(f"rules[{number}].detector.terms[{at}]", term)
        if chars > TERM_CHARS_MAX:
            why = f"the terms up to here have {chars} characters, and may have {TERM_CHARS_MAX}"
            raise PolicyError(f"rules[{number}].detector.terms", why)


def _term_chars(param: str, term: str) -> int:
    folded = "".join(map(fold, term))
    if not folded.strip():
        raise PolicyError(param, "nothing of it can be seen")
    return len(folded)
