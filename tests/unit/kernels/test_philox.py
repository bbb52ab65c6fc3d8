"""Philox against its authors' known answers, and the uniform numbers made of it."""

import pytest
import torch

from kernels.philox import philox, uniform

ONES = 0xFFFFFFFF
# From `kat_vectors` of the authors' Random123 library: counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]):
    k0, k1 = _words(*key)
    assert tuple(word.item() for word in philox(_words(*counter), (k0, k1))) == answer


def _uniform(seed: int = 0, choice: int = 0, index: int = 0) -> float:
    return uniform(*_words(seed, choice, index)).item()


def test_each_of_seed_choice_and_index_matters_in_all_its_bits() -> None:
    words = [0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**63 - 1]
    numbers = {_uniform(seed=seed) for seed in words}
    numbers |= {_uniform(choice=choice) for choice in words}
    numbers |= {_uniform(index=index) for index in words}
    assert len(numbers) == 3 * len(words) - 2  # (0, 0, 0) was asked for three times
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    seeds, choices, indices = torch.randint(2**62, (3, 50))
    together = uniform(seeds, choices, indices)
    alone = [_uniform(*words) for words in zip(seeds, choices, indices, strict=True)]
    assert together.tolist() == alone


def test_numbers_are_spread_evenly_along_indices_and_along_seeds() -> None:
    count = 20_000
    zeros, run = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    for numbers in (uniform(zeros, zeros, run), uniform(run, zeros, zeros)):
        found = torch.histc(numbers.float(), bins=100, min=0, max=1)
        expected = count / 100
        # Chi-square with 99 degrees of freedom: over 160 happens once in ten thousand.
        assert ((found - expected).square() / expected).sum() < 160
