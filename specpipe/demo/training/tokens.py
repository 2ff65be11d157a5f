"""The corpus as token ids: encodes it once, then serves batches of windows from the encoded file.

The training stream is every training document (files and chat samples) in one shuffled order, each ended by
`<|endoftext|>`. A batch is a set of windows cut from the stream at shuffled places, so windows may start in the
middle of a document.
"""

import argparse
import io
import logging
import random
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from specpipe import demo
from specpipe.demo.training import corpus
from specpipe.demo.training.paths import replace_file, start_logging, work_path
from specpipe.demo.training.tokenizer import END_OF_TEXT, format_exchange

_log = logging.getLogger(__name__)

TRAINING_STREAM, HELD_OUT_STREAM = "training.npy", "held_out.npy"

Tokens = npt.NDArray[np.uint16]


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.target_folder() / "tokenizer.json"))


def load_stream(name: str) -> Tokens:
    """The stream `name` of the work folder, mapped read-only. [num_tokens] uint16"""
    stream: Tokens = np.load(work_path(name), mmap_mode="r")
    return stream


class WindowSampler:
    """Hands out batches of windows of one length, every place of the stream once before any comes again.

    Batch number `step` is a function of (seed, step) alone, so a resumed run goes on where it stopped.
    """

    def __init__(self, stream: Tokens, *, window: int, batch_size: int, seed: int) -> None:
        self._stream = stream
        self._window = window
        self._batch_size = batch_size
        self._seed = seed
        self._num_batches = (len(stream) - window) // window // batch_size
        self._epoch = -1
        self._starts: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def batch(self, step: int) -> npt.NDArray[np.int64]:
        """Windows of batch number `step`. [batch_size, window] int64"""
        epoch, index = divmod(step, self._num_batches)
        if epoch != self._epoch:
            self._shuffle(epoch)
        starts = self._starts[index * self._batch_size : (index + 1) * self._batch_size]
        return np.stack([self._stream[start : start + self._window] for start in starts]).astype(np.int64)

    def _shuffle(self, epoch: int) -> None:
        generator = np.random.default_rng((self._seed, epoch))
        offset = int(generator.integers(self._window))
        places = np.arange((len(self._stream) - self._window) // self._window, dtype=np.int64)
        self._starts = offset + self._window * generator.permutation(places)
        self._epoch = epoch


def _documents(paths: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Texts of the files at `paths` and of the chats made from them, with whether each is a chat."""
    for path in paths:
        source = corpus.read_source(path) or ""
        yield source, False
        for exchange in corpus.chat_samples(path, source):
            yield format_exchange(exchange), True


def _encode(paths: list[str], seed: int) -> tuple[Tokens, dict[str, int]]:
    tokenizer = load_tokenizer()
    end = tokenizer.token_to_id(END_OF_TEXT)
    documents = list(_documents(paths))
    random.Random(seed).shuffle(documents)
    counts = {"files": 0, "chats": 0, "file_tokens": 0, "chat_tokens": 0}
    pieces = []
    for text, is_chat in documents:
        ids = [*tokenizer.encode(text).ids, end]
        pieces.append(np.array(ids, dtype=np.uint16))
        counts["chats" if is_chat else "files"] += 1
        counts["chat_tokens" if is_chat else "file_tokens"] += len(ids)
    return np.concatenate(pieces), counts


def _write_stream(name: str, paths: list[str], seed: int) -> None:
    stream, counts = _encode(paths, seed)
    buffer = io.BytesIO()
    np.save(buffer, stream)
    replace_file(work_path(name), buffer.getvalue())
    _log.info("%s: %d tokens, %s", name, len(stream), counts)


def main() -> None:
    start_logging()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    _write_stream(TRAINING_STREAM, corpus.training_files(), args.seed)
    _write_stream(HELD_OUT_STREAM, corpus.held_out_library_files(), args.seed)


if __name__ == "__main__":
    main()
