"""What is remembered is what would have been encoded, within a bound, and each tenant's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_llama import CONTROL
from text.chat import Chat, ChatMessage, TextRefusedError
from text.memory import RunMemory
from text.rules import TextRules

turns = st.lists(
    st.lists(st.sampled_from([*CONTROL, "<|im_", "start", " a", "é", "\n"]), max_size=4).map(
        "".join
    ),
    min_size=1,
    max_size=4,
)


def chat_of(contents: list[str]) -> Chat:
    return Chat(tuple(ChatMessage("user", content) for content in contents))


@given(st.lists(turns, min_size=1, max_size=5))
def test_a_memory_changes_no_id(tiny_rules: TextRules, chats: list[list[str]]):
    memory = RunMemory(100_000)
    for contents in chats:
        chat = chat_of(contents)
        assert tiny_rules.prompt(chat, memory=memory) == tiny_rules.prompt(chat)


def test_a_chat_that_goes_on_is_encoded_from_where_it_went_on(tiny_rules: TextRules):
    memory = RunMemory(100_000)
    tiny_rules.prompt(chat_of(["one", "two"]), memory=memory)
    known = memory.bytes
    tiny_rules.prompt(chat_of(["one", "two"]), memory=memory)
    assert memory.bytes == known
    tiny_rules.prompt(chat_of(["one", "two", "three"]), memory=memory)
    assert memory.bytes > known


def test_a_text_that_is_refused_is_not_remembered(tiny_rules: TextRules):
    memory = RunMemory(100_000)
    for _ in range(2):
        with pytest.raises(TextRefusedError):
            tiny_rules.prompt(chat_of(["\ud800"]), memory=memory)


def test_the_first_run_is_not_any_other():
    memory = RunMemory(100_000)
    memory.keep([1], first=True, run="a")
    assert memory.recall(first=False, run="a") is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=60))
def test_a_memory_stays_within_its_bound(words: list[tuple[int, int]]):
    memory = RunMemory(4_000)
    for name, length in words:
        memory.keep([name] * length, first=False, run=f"{name}")
        assert 0 <= memory.bytes <= 4_000
        known = memory.recall(first=False, run=f"{name}")
        assert known is None or set(known) <= {name}


def test_the_run_used_longest_ago_goes_first():
    memory = RunMemory(1_200)
    for run in "abcd":
        memory.keep([1], first=False, run=run)
    memory.recall(first=False, run="a")
    memory.keep([1], first=False, run="e")
    known = [run for run in "abcde" if memory.recall(first=False, run=run) is not None]
    assert known == ["a", "c", "d", "e"]


def test_a_run_too_large_is_not_kept():
    memory = RunMemory(4_000)
    memory.keep([1] * 500, first=False, run="a")
    assert (memory.recall(first=False, run="a"), memory.bytes) == (None, 0)
