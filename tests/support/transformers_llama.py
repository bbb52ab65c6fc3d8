"""transformers' own Llama as the judge of ours: same weights, float32, independent code."""

from collections.abc import Iterable, Sequence

import msgspec
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from worker.weights import Weights


class Verdict(msgspec.Struct):
    """`divergences` holds the gap between the judge's two likeliest at each first difference."""

    equal: int = 0
    divergences: list[float] = msgspec.field(default_factory=list)

    def assert_right(self, *, epsilon: float, divergences_max: int) -> None:
        """A different token is forgiven where rounding decides, and only a few times."""
        assert all(gap < epsilon for gap in self.divergences), self
        assert len(self.divergences) <= divergences_max, self


def transformers_llama(weights: Weights) -> LlamaForCausalLM:
    """The judge. Leaves `weights` as they are, and shares their memory."""
    config = weights.config
    assert not config.rope_factors
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_tokens,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
            tie_word_embeddings=config.tied_head,
        )
    )
    tensors = dict(weights.tensors)
    if config.tied_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def logits_along(
    model: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """The judge's logits (len(output), V) before each token of `output`."""
    fed = torch.tensor([[*prompt, *output[:-1]]])
    return model(fed, logits_to_keep=len(output)).logits[0].float()


def judge(
    model: LlamaForCausalLM, answers: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> Verdict:
    """Compare greedy answers, each (prompt, output), up to the first difference.

    One pass over prompt and output tells the judge's choice after every prefix of the output.
    Up to the first difference those prefixes are its own greedy output too.
    """
    verdict = Verdict()
    for prompt, output in answers:
        logits = logits_along(model, prompt, output)
        differs = (logits.argmax(-1) != torch.tensor(output)).nonzero()
        if not len(differs):
            verdict.equal += 1
            continue
        first = int(differs[0])
        likeliest, second = logits[first].topk(2).values.tolist()
        chosen = logits[first, output[first]].item()
        verdict.divergences.append(max(likeliest - second, likeliest - chosen))
    return verdict
