"""Small random models with a real tokenizer, made where they are needed: nothing is downloaded, nothing is checked in.

The target is an eight-layer Llama; the draft is its first layer alone, faster by so much, and the other layers change
little, so that some of its guesses are right. Weights are drawn wide, so that logits are far apart and two ways of
adding them up rarely disagree about the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 320
NUM_LAYERS = 8
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = (
    "def tokens(line): return [part for part in line.split() if part]",
    "A fast draft model guesses ahead; the large target model checks many guesses in one forward pass.",
    "for index, value in enumerate(values): print(index, value)",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 中文 한국어 😀",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyPair:
    target: Path
    draft: Path


def make_pair(folder: Path, *, max_positions: int = 512) -> TinyPair:
    """Both folders as `from_pretrained` wants them, with equal tokenizers."""
    pair = TinyPair(target=folder / "target", draft=folder / "draft")
    tokenizer = make_tokenizer()
    target = make_llama(num_layers=NUM_LAYERS, max_positions=max_positions, seed=1)
    for index in range(1, NUM_LAYERS):
        soften_layer(target, index)
    draft = make_llama(num_layers=1, max_positions=max_positions, seed=1)
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    for path, model in ((pair.target, target), (pair.draft, draft)):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return pair


def make_self_pair(folder: Path, *, num_silent: int = 23) -> TinyPair:
    """A draft that says what its target says, bit for bit, and says it sooner: the target has silent layers as well."""
    pair = TinyPair(target=folder / "target", draft=folder / "draft")
    draft = make_llama(num_layers=1, max_positions=512, seed=1)
    target = make_llama(num_layers=1 + num_silent, max_positions=512, seed=1)
    target.load_state_dict(draft.state_dict(), strict=False)
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    for path, model in ((pair.target, target), (pair.draft, draft)):
        model.save_pretrained(path)
        make_tokenizer().save_pretrained(path)
    return pair


def make_random_draft(folder: Path) -> Path:
    """A draft with the target's tokenizer that is nearly always wrong."""
    make_llama(num_layers=1, max_positions=512, seed=99).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE that begins every text with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_alphabet_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """<s>, </s> and a token for each letter, without any merge: for models whose answers are counted."""
    tokens = ["<s>", "</s>", *(chr(ord("a") + index) for index in range(vocab_size - 2))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def make_llama(*, num_layers: int, max_positions: int, seed: int, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """Deterministic in its arguments."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 3.0  # far apart
    return model


def soften_layer(model: LlamaForCausalLM, index: int) -> None:
    """Let a layer change little, so that the model without it is often right."""
    layer = model.model.layers[index]
    with torch.no_grad():
        layer.self_attn.o_proj.weight *= 0.11
        layer.mlp.down_proj.weight *= 0.11
