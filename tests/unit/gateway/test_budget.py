"""What is held for a request and what it may produce for that: exact, at every price."""

from hypothesis import given
from hypothesis import strategies as st

from core.money import Price, worst_case_micro
from gateway.relay.budget import affordable_tokens, first_ask, next_ask, slack_tokens
from gateway.routing import Size

RATES = st.integers(0, 50_000_000)
PRICES = st.builds(
    Price,
    id=st.just("p"),
    input_micro=RATES,
    cached_input_micro=RATES,
    output_micro=RATES,
    request_micro=st.integers(0, 10_000),
    reasoning_micro=RATES,
)
SIZES = st.builds(
    Size,
    prompt_tokens=st.integers(0, 200_000),
    max_tokens=st.integers(1, 100_000),
    choices=st.integers(1, 8),
)


def cost(price: Price, size: Size, output_tokens: int) -> int:
    return worst_case_micro(price, prompt_tokens=size.prompt_tokens, output_tokens=output_tokens)


@given(PRICES, SIZES, st.integers(0, 10**10))
def test_what_is_held_pays_for_so_many_tokens_and_not_one_more(price, size, held):
    tokens = affordable_tokens(price, size, held)
    assert 0 <= tokens <= size.output_tokens
    assert tokens == 0 or cost(price, size, tokens) <= held
    assert tokens == size.output_tokens or cost(price, size, tokens + 1) > held


@given(PRICES, SIZES, st.integers(1, 4_096))
def test_what_is_asked_for_at_first_pays_for_the_first_stretch(price, size, first):
    ask = first_ask(price, size, first)
    assert 0 <= ask.floor_micro <= ask.amount_micro
    stretch = min(first, size.output_tokens)
    assert affordable_tokens(price, size, ask.amount_micro) >= stretch
    assert ask.amount_micro == cost(price, size, stretch)
    assert ask.floor_micro == cost(price, size, min(stretch, 16 * size.choices))


@given(PRICES, SIZES, st.data())
def test_every_top_up_brings_each_choice_a_token_until_the_whole_is_held(price, size, data):
    held = data.draw(st.integers(0, 10**10))
    tokens = affordable_tokens(price, size, held)
    if tokens == size.output_tokens:
        return
    ask = next_ask(price, size, tokens)
    # Or else the ledger would hold nothing more and call that an answer.
    assert held < ask.floor_micro <= ask.amount_micro
    least = affordable_tokens(price, size, ask.floor_micro)
    assert least >= min(size.output_tokens, tokens + size.choices)
    whole = min(size.output_tokens, 2 * tokens)
    assert affordable_tokens(price, size, ask.amount_micro) >= whole


def test_a_long_answer_doubles_what_it_holds_until_all_of_it_is_held():
    price = Price(id="p", input_micro=1_000_000, cached_input_micro=0, output_micro=4_000_000)
    size = Size(prompt_tokens=10, max_tokens=300, choices=1)
    ask = first_ask(price, size, 40)
    held = [ask.amount_micro]
    while (tokens := affordable_tokens(price, size, held[-1])) < size.output_tokens:
        held.append(next_ask(price, size, tokens).amount_micro)
    assert held == [10 + 4 * tokens for tokens in (40, 80, 160, 300)]


@given(SIZES, st.integers(0, 10_000))
def test_an_answer_is_ended_early_by_a_small_part_at_most(size, tokens):
    assert 0 <= slack_tokens(size, tokens) <= tokens / 32
    assert slack_tokens(size, 10**6) == 16 * size.choices
