"""Policies of every kind with a text that each has something to say to, and rules by default."""

from typing import Any

from core.safety.policy import PII, PII_KINDS, Pattern, Policy, Rule, Terms
from core.safety.rulebook import Rulebook


def a_rule(**fields: Any) -> Rule:
    values: dict[str, Any] = {
        "name": "rule",
        "stages": ("input", "output"),
        "detector": Terms(terms=("secret",)),
        "action": "mask",
    }
    return Rule(**values | fields)


def a_book(*detectors: Any, **fields: Any) -> Rulebook:
    """A rule for each detector."""
    rules = [a_rule(name=f"r{n}", detector=each, **fields) for n, each in enumerate(detectors)]
    return Rulebook(Policy(rules=tuple(rules)))


def terms(*words: str, whole_word: bool = False) -> Terms:
    return Terms(terms=words, whole_word=whole_word)


def pattern(text: str, *, ignore_case: bool = False) -> Pattern:
    return Pattern(pattern=text, ignore_case=ignore_case)


def pii(*kinds: Any) -> PII:
    return PII(kinds=kinds or PII_KINDS)


# detector, a text, and what is left of it
CASES: tuple[tuple[Any, str, str], ...] = (
    (terms("secret"), "a secret b", "a # b"),
    (terms("he", "she", "his", "hers"), "ushers", "u#"),
    (terms("secret"), "a SéCRET b", "a # b"),
    (terms("secret"), "a se\u200bcr\u200bet\u200b b", "a # b"),
    (terms("strasse"), "die Straße hier", "die # hier"),
    (terms("\uff41\uff42\uff43"), "x abc y", "x # y"),
    (terms("cat", whole_word=True), "cat concat cats cat", "# concat cats #"),
    (terms("new york"), "in New York now", "in # now"),
    (terms("aa"), "baaab", "b#b"),
    (terms("ab", "abcd"), "abce abcd", "#ce #"),
    (terms("\U0001f4a3"), "a \U0001f4a3\U0001f4a3 b", "a # b"),
    (pattern("ab"), "xabyabz", "x#y#z"),
    (pattern(r"a{2,4}b?c"), "aaac aac ac", "# # ac"),
    (pattern(r"\bfoo\b"), "foo food foo.", "# food #."),
    (pattern(r"\d{4}"), "12345 123", "# 123"),
    (pattern(r"(?:ab|ca){1,3}c"), "abcac abac", "# abac"),
    (pattern(r"[^a-z ]{2}"), "a12b C D EF", "a#b C D #"),
    (pattern(r"^ab"), "ab ab", "# ab"),
    (pattern(r"ab$"), "ab ab", "ab #"),
    (pattern(r"\Bx"), "x ax", "x a#"),
    (pattern("secret", ignore_case=True), "a SeCrEt b", "a # b"),
    (pattern(r"a.c"), "abc a\nc", "# a\nc"),
    (pattern(r"\u20ac\x41?"), "€A €B", "# #B"),
    (pattern(r"[\w-]{2,5}@x"), "me@x a-b@x", "# #"),
    (pii("card"), "pay 4111 1111 1111 1111 now", "pay # now"),
    (pii("card"), "no 4111 1111 1111 1112 now", "no 4111 1111 1111 1112 now"),
    (pii("iban"), "to DE89 3704 0044 0532 0130 00.", "to #."),
    (pii("email"), "to a.b+c@ex-1.example.org!", "to #!"),
    (pii("phone"), "at +49 170 1234567, or (555) 123-4567.", "at #, or #."),
    (pii("ssn"), "is 078-05-1120 or 666-05-1120", "is # or 666-05-1120"),
    (pii("ipv4"), "on 10.0.0.255 or 10.0.0.256", "on # or 10.0.0.256"),
    (pii("ipv6"), "on 2001:db8::ff00:42 or std::x", "on # or std::x"),
    (pii("api_key"), "key sk-abcdefghijklmnopqrstuvwx.", "key #."),
    (pii("api_key"), "AKIAIOSFODNN7EXAMPLE is one", "# is one"),
)
