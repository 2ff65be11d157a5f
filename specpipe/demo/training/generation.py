"""Plain batched generation, for training text and for measuring; not the product's engine."""

import torch
from transformers import DynamicCache, LlamaForCausalLM


def continue_texts(
    model: LlamaForCausalLM,
    prompts: torch.Tensor,
    num_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Prompts of one length, each followed by `num_tokens` tokens of the model's; nothing ends a text early.

    Temperature 0 takes the likeliest token. [batch, length] -> [batch, length + num_tokens] int64
    """
    cache = DynamicCache(config=model.config)
    columns = [prompts]
    with torch.no_grad():
        for _ in range(num_tokens):
            output = model(input_ids=columns[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            columns.append(_choose(output.logits[:, -1], temperature, generator))
    return torch.cat(columns, dim=1)


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> torch.Tensor:
    """[batch, vocab] -> [batch, 1]"""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
