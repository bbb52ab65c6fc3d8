"""The sampler as one row after another, from the loops of `kernels.reference`: what to expect."""

from collections.abc import Sequence

import torch

from core.protocol import Sampling
from kernels import reference
from kernels.philox import uniform
from worker.step import Draw, Opening

EOS_IDS = (0,)


def a_sampling(**changes) -> Sampling:
    return Sampling(**({"seed": 7, "max_tokens": 100} | changes))


def opening_draw(
    sampling: Sampling,
    *,
    slot: int = 0,
    choice: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Draw:
    """The draw after `output`, which opens the slot."""
    opening = Opening(
        choice=choice, sampling=sampling, prompt_ids=tuple(prompt), output_ids=tuple(output)
    )
    return Draw(slot=slot, index=len(output), opening=opening)


def changed_logits(
    logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """One row's logits (V,) as a token is chosen from them."""
    eos_ids = () if sampling.ignore_eos else EOS_IDS
    constrained = reference.constrained_logits(
        logits,
        output_ids=output,
        allowed_ids=sampling.allowed_ids,
        bad_words=sampling.bad_words,
        end_ids=(*eos_ids, *sampling.stop_ids),
        min_tokens=sampling.min_tokens,
        logit_bias=sampling.logit_bias,
    )
    return reference.penalised_logits(
        constrained,
        prompt_ids=prompt if sampling.repetition_penalty != 1 else (),
        output_ids=output,
        repetition=sampling.repetition_penalty,
        frequency=sampling.frequency_penalty,
        presence=sampling.presence_penalty,
    )


def specified_token(
    logits: torch.Tensor,
    sampling: Sampling,
    *,
    choice: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> int | None:
    """What follows `output`, by `logits` (V,); None where nothing may."""
    changed = changed_logits(logits, sampling, prompt, output)[None]
    if changed.amax() == -torch.inf:
        return None
    if sampling.temperature == 0:
        return int(changed.argmax())
    probabilities = reference.filtered_probabilities(
        changed,
        torch.tensor([sampling.temperature]),
        torch.tensor([sampling.top_k]),
        torch.tensor([sampling.top_p], dtype=torch.float64),
        torch.tensor([sampling.min_p]),
    )
    words = torch.tensor([sampling.seed, choice, len(output)])
    chance = uniform(*words[:, None].unbind(0))
    return int(reference.draw(probabilities, reference.sampling_order(changed), chance))
