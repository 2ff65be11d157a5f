"""From an EngineConfig to a ModelRunner.

Owns: dtype, device, context limit and number of slots; loading weights through transformers; admission of families.
Must not know: workers, sessions, the wire.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specpipe.config import ROUNDED, EngineConfig
from specpipe.engine import families, rope, self_check
from specpipe.engine.folder import ModelFolder, check_folder
from specpipe.engine.linear import can_round
from specpipe.engine.memory import Memory, free_memory, total_memory
from specpipe.engine.prepared import PreparedModel
from specpipe.engine.runner import ModelRunner
from specpipe.errors import ConfigError, UnsupportedModelError
from specpipe.types import ModelInfo

OnProgress = Callable[[float, str], None]

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT = 4096  # of a model whose config sets no limit
MAX_DEFAULT_SESSIONS = 16  # full contexts that the default number of slots holds
MAX_DEFAULT_CONTEXT = 4096  # slots counted for each of them
MEMORY_SHARE = 0.25  # of the memory free after loading, for keys and values, on a CPU
GPU_MEMORY_SHARE = 0.8  # on a GPU


class Ranks(Protocol):
    """The ranks among which a model is split; see specpipe.engine.parallel.collective."""

    num_on_host: int  # of them, with one memory

    def minimum(self, value: int) -> int:
        """The least of all ranks' values."""
        ...


def load_model(config: EngineConfig, *, on_progress: OnProgress | None = None, is_hint: bool = False) -> ModelRunner:
    """Load a model and give it room. `is_hint`: nothing that it computes is final, so its weights may be rounded.

    The context limit is the model's own, or `config.max_context` if that is less, or what the slots can hold. Without
    `config.num_slots` there are slots for min(max_sessions, 16) contexts of at most 4096 tokens, and for one full
    context at least, as far as a quarter of the free memory (GPU: 80 %) allows; a container's limit counts.
    Raises ConfigError (missing or broken files, no such device), UnsupportedModelError (with the reason).
    """
    report = on_progress or (lambda *_: None)
    report(0.0, "checking files")
    folder = check_folder(config.model)
    device = _device(config)
    torch.set_num_threads(config.num_threads)
    report(0.1, f"loading {folder.name}")
    model = load_weights(folder, config.dtype).to(device)
    report(0.8, "preparing")
    runner = create_runner(model, folder, config, is_rounded=is_rounded(model, config.dtype, is_hint=is_hint))
    report(1.0, f"{folder.name} is ready")
    return runner


def is_rounded(model: PreTrainedModel, dtype: str, *, is_hint: bool) -> bool:
    """Whether weights are rounded to 8 bits: where that is asked for, and those of a hint by default if they came in
    bfloat16. Raises ConfigError where they are to be and cannot."""
    weight, name = next(model.parameters()), type(model).__name__
    can = can_round(weight) and name in families.PROVEN
    if dtype == ROUNDED and not can:
        raise ConfigError(f"dtype {ROUNDED} needs an x86 CPU with AVX2 and a proven family (this is {name}): use auto")
    return can and (dtype == ROUNDED or (is_hint and dtype == "auto" and weight.dtype is torch.bfloat16))


def log_progress(fraction: float, text: str) -> None:
    """An OnProgress of processes that have nobody to watch them load."""
    logger.info("%3.0f %% %s", 100 * fraction, text)


def load_weights(folder: ModelFolder, dtype: str) -> PreTrainedModel:
    """The transformers model with all its weights; no weight may be missing or left over unloaded."""
    with quiet_transformers(), translated_errors(folder):
        model_config = read_config(folder)
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder.path,
            config=model_config,
            dtype=resolve_dtype(dtype, model_config),
            output_loading_info=True,
            **({"gguf_file": folder.gguf.name} if folder.gguf else {"use_safetensors": True}),
            local_files_only=True,
        )
    _refuse_incomplete(folder, loading)
    if folder.gguf is not None:
        model.is_quantized = False  # said of every GGUF and forbids float(); the weights are unpacked
    return model


def read_config(folder: ModelFolder) -> PreTrainedConfig:
    """The model's config as transformers has it. Raises UnsupportedModelError for a GGUF of what is not served."""
    if folder.gguf is None:
        return AutoConfig.from_pretrained(folder.path, local_files_only=True)
    config = AutoConfig.from_pretrained(folder.path, gguf_file=folder.gguf.name, local_files_only=True)
    if reason := families.reason_to_refuse(config.to_dict()):
        raise UnsupportedModelError(f"{folder.gguf}: {reason}")
    return config


def create_runner(
    loaded: PreTrainedModel,
    folder: ModelFolder,
    config: EngineConfig,
    *,
    group: Ranks | None = None,
    is_rounded: bool = False,
) -> ModelRunner:
    """A runner for a loaded model: context limit, rotary frequencies, admission, slots.

    `group`: the ranks that this call is made on at the same time, if `loaded` is one rank's part.
    """
    max_context = min(folder.max_positions or DEFAULT_CONTEXT, config.max_context or 2**31)
    fingerprint = folder.fingerprint(ROUNDED if is_rounded else str(loaded.dtype).removeprefix("torch."))
    rope.fix_frequencies(loaded, max_context)
    model = PreparedModel(loaded, is_rounded=is_rounded)
    if model.name not in families.PROVEN:
        self_check.check_model(model, max_context)
    num_sharing = group.num_on_host if group and config.device == "cpu" else 1  # ranks with one memory
    free = _free(model.device).shared_by(num_sharing)
    num_slots = config.num_slots or default_num_slots(config, max_context, model.bytes_per_slot, free)
    _check_room(num_slots, model.bytes_per_slot, _total(model.device).shared_by(num_sharing))
    if group is not None:
        num_slots = group.minimum(num_slots)
    if num_slots <= max_context:
        logger.info("%s: context limited to %d tokens, the number of KV slots", folder.name, num_slots - 1)
        max_context = num_slots - 1
    info = ModelInfo(
        name=folder.name,
        fingerprint=fingerprint,
        tokenizer_fingerprint=folder.vocabulary.fingerprint,
        vocab_size=min(folder.vocabulary.size, model.num_output_rows),
        max_context=max_context,
        eos_token_ids=folder.eos_token_ids,
    )
    return ModelRunner(model, info, num_slots=num_slots)


def default_num_slots(config: EngineConfig, max_context: int, bytes_per_slot: int, free: Memory) -> int:
    """Slots when none are asked for, slot 0 included. Raises ConfigError if not even 64 tokens fit."""
    num_sessions = min(config.max_sessions, MAX_DEFAULT_SESSIONS)
    wanted = max(num_sessions * min(max_context, MAX_DEFAULT_CONTEXT), max_context + config.max_batch_tokens) + 1
    share = MEMORY_SHARE if config.device == "cpu" else GPU_MEMORY_SHARE
    affordable = int(free.num_bytes * share) // bytes_per_slot
    if affordable < 64:
        remedy = "raise that limit or set num_slots" if free.limit else "set num_slots"
        raise ConfigError(f"{free.told('free memory')} hold only {affordable} KV slots; {remedy}")
    return min(wanted, affordable)


def _check_room(num_slots: int, bytes_per_slot: int, total: Memory) -> None:
    """Raises ConfigError for more slots than the whole memory holds (pages that no slot has touched cost none)."""
    if num_slots * bytes_per_slot > total.num_bytes:
        raise ConfigError(
            f"num_slots {num_slots} does not fit: {bytes_per_slot} bytes a slot, {total.told('memory')}; "
            f"at most {total.num_bytes // bytes_per_slot} slots"
        )


def resolve_dtype(name: str, config: PreTrainedConfig) -> torch.dtype:
    """`auto` is the dtype in the model's config; float32 if it names none, or float16, which float32 holds exactly.
    Weights that will be rounded are loaded as that says."""
    if name not in ("auto", ROUNDED):
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    stored = getattr(config, "dtype", None)
    if isinstance(stored, str):
        stored = getattr(torch, stored, None)
    return torch.bfloat16 if stored is torch.bfloat16 else torch.float32


def _device(config: EngineConfig) -> torch.device:
    if config.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device {config.device!r} was asked for, but torch sees no CUDA device")
    return torch.device(config.device)


def _total(device: torch.device) -> Memory:
    return Memory(int(torch.cuda.mem_get_info(device)[1])) if device.type == "cuda" else total_memory()


def _free(device: torch.device) -> Memory:
    return Memory(int(torch.cuda.mem_get_info(device)[0])) if device.type == "cuda" else free_memory()


def _refuse_incomplete(folder: ModelFolder, loading: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers and only warns."""
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(name) for name in loading.get(problem) or ())
        if names:
            kind = problem.replace("_", " ")
            raise ConfigError(
                f"{folder.path}: the weights do not fill the model ({kind}: {names[0]}, {len(names)} in all)"
            )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or advice on our terminal: progress goes to the callback, problems become errors."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # GGUF conversion draws a bar of its own
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def translated_errors(folder: ModelFolder) -> Iterator[None]:
    """Errors of transformers and of its readers become one sentence that names the folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModelError(f"{folder.path}: transformers cannot load it ({first_line})") from error
