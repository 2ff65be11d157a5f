"""Tiny random models of every proven family, and sessions that drive a runner the way both workers do.

A `Driver` grows sessions by random prefill splits, decode rows and tree rows in mixed batches, with slots in no order,
and keeps for every row the exact path it should have seen; `worst_error` compares all of them with a second, stock copy
of the model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.engine.prepared import PreparedModel
from specpipe.engine.runner import ModelRunner
from specpipe.engine.slots import SlotPool
from specpipe.types import ModelInfo

VOCAB = 97
WINDOW = 7

_ROPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _ROPE),
    "llama_mha_bias": ("LlamaConfig", {**_ROPE, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (
        "LlamaConfig",
        {
            **_ROPE,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2": ("Qwen2Config", _ROPE),
    "qwen2_windows": (
        "Qwen2Config",
        {**_ROPE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_ROPE, "head_dim": 16}),
    "mistral": ("MistralConfig", {**_ROPE, "sliding_window": WINDOW}),
    "mistral_full": ("MistralConfig", {**_ROPE, "sliding_window": None, "head_dim": 16}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt2_scaled": (
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            "scale_attn_by_inverse_layer_idx": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_ROPE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {key: value for key, value in _ROPE.items() if key not in ("num_key_value_heads",)},
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 32,
            "pad_token_id": 1,
            "bos_token_id": 2,
            "eos_token_id": 2,
        },
    ),
    "phi3": ("Phi3Config", {**_ROPE, "sliding_window": None}),
    "phi3_window": ("Phi3Config", {**_ROPE, "sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {**_ROPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_window": (
        "MixtralConfig",
        {**_ROPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
}


def create_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model whose logits really depend on every token: weights larger than transformers' initial ones."""
    config_class, fields = CONFIGS[family]
    config = getattr(transformers, config_class)(**{**fields, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def stock_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A second copy that keeps transformers' own attention (configs are not shared)."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def create_info(vocab_size: int = VOCAB, max_context: int = 128) -> ModelInfo:
    return ModelInfo(
        name="tiny",
        fingerprint="",
        tokenizer_fingerprint="",
        vocab_size=vocab_size,
        max_context=max_context,
        eos_token_ids=(2,),
    )


def create_runner(model: PreTrainedModel, *, num_slots: int = 400, max_context: int = 128) -> ModelRunner:
    return ModelRunner(PreparedModel(model), create_info(max_context=max_context), num_slots=num_slots)


@dataclass
class Node:
    path: list[int]  # tokens below the context, this node's last
    slot: int
    visible: int  # bits over the session's nodes
    is_computed: bool = False


@dataclass
class DrivenSession:
    name: int
    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    num_computed: int = 0
    nodes: list[Node] = field(default_factory=list)


@dataclass
class SeenRow:
    path: list[int]
    logits: np.ndarray


class Driver:
    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        self.runner = runner
        self.rng = np.random.default_rng(seed)
        self.pool = SlotPool(runner.num_slots)
        self.shuffled: list[int] = []
        self.sessions: list[DrivenSession] = []
        self.seen: list[SeenRow] = []

    def open(self, num_tokens: int) -> DrivenSession:
        session = DrivenSession(name=len(self.sessions) + 1, tokens=self.random_tokens(num_tokens))
        self.sessions.append(session)
        return session

    def random_tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, VOCAB, count).tolist()

    def take_slots(self, count: int) -> list[int]:
        """Slots in random order, so that neither order nor neighbourhood can be relied on."""
        if not self.shuffled:
            self.shuffled = self.pool.allocate(self.pool.num_free)
            self.rng.shuffle(self.shuffled)
        return [self.shuffled.pop() for _ in range(count)]

    def grow_tree(self, session: DrivenSession, count: int) -> None:
        """Add nodes below random parents; a new node is computed by a later `rows`."""
        for slot in self.take_slots(count):
            parent = int(self.rng.integers(-1, len(session.nodes)))
            path, visible = ([], 0) if parent < 0 else (session.nodes[parent].path, session.nodes[parent].visible)
            node = Node(path=[*path, *self.random_tokens(1)], slot=slot, visible=visible | 1 << len(session.nodes))
            session.nodes.append(node)

    def rows(self, session: DrivenSession, num_committed: int | None = None) -> SessionRows:
        """The next committed rows (all that is missing unless told), and every node not yet computed."""
        start = session.num_computed
        end = len(session.tokens) if num_committed is None else start + num_committed
        new_nodes = (
            [] if end < len(session.tokens) else [k for k, node in enumerate(session.nodes) if not node.is_computed]
        )
        nodes = session.nodes if new_nodes else []
        session.slots += self.take_slots(end - len(session.slots))
        return SessionRows(
            session=session.name,
            context_slots=session.slots[:end],
            num_computed=start,
            tokens=session.tokens[start:end] + [session.nodes[k].path[-1] for k in new_nodes],
            num_committed_rows=end - start,
            tree_slots=[node.slot for node in nodes],
            tree_rows=new_nodes,
            tree_positions=[end + len(node.path) - 1 for node in nodes],
            tree_visible=[session.nodes[k].visible for k in new_nodes],
            wants_logits=[True] * (end - start + len(new_nodes)),
        )

    def step(self, *batch: SessionRows) -> None:
        logits = self.runner.forward(StepBatch(sessions=list(batch)))
        assert logits.dtype == np.float32
        assert logits.shape == (sum(len(rows.tokens) for rows in batch), self.runner.info.vocab_size)
        paths = [path for rows in batch for path in self._paths(rows)]
        self.seen += [SeenRow(path, row.copy()) for path, row in zip(paths, logits, strict=True)]

    def _paths(self, rows: SessionRows) -> list[list[int]]:
        session = self.sessions[rows.session - 1]
        end = rows.num_computed + rows.num_committed_rows
        paths = [session.tokens[: position + 1] for position in range(rows.num_computed, end)]
        session.num_computed = end
        for index in rows.tree_rows:
            session.nodes[index].is_computed = True
            paths.append(session.tokens + session.nodes[index].path)
        return paths

    def commit(self, session: DrivenSession, node: Node) -> None:
        """Accept a computed node's path: its slots join the context, the other nodes go, one more token follows."""
        path = [other for k, other in enumerate(session.nodes) if node.visible >> k & 1]
        session.slots += [other.slot for other in path]
        session.tokens += node.path
        session.num_computed += len(path)
        session.nodes = []
        session.tokens += self.random_tokens(1)

    def worst_error(self, stock: PreTrainedModel) -> float:
        """Largest difference of any row from a fresh stock forward of its path, or of one that continues it."""
        rows: dict[tuple[int, ...], np.ndarray] = {}
        worst = 0.0
        for seen in sorted(self.seen, key=lambda seen: -len(seen.path)):
            if tuple(seen.path) not in rows:
                with torch.inference_mode():
                    logits = stock(input_ids=torch.tensor([seen.path]), use_cache=False).logits[0].numpy()
                rows.update({tuple(seen.path[: end + 1]): row for end, row in enumerate(logits)})
            want = rows[tuple(seen.path)][: len(seen.logits)]
            worst = max(worst, float(np.abs(seen.logits - want).max()))
        return worst
