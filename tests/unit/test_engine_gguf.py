"""GGUF files load through transformers and equal the safetensors model they were made from."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cases import VOCAB, Driver

from specpipe.config import EngineConfig
from specpipe.engine.folder import check_folder
from specpipe.engine.loader import load_model
from specpipe.errors import ConfigError

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from gguf_files import ARCHITECTURES, write_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A float32 GGUF of a tiny model; the last two entries of its vocabulary are padding."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen2", num_unused=2, tie_word_embeddings=False)
    return path


def test_a_gguf_file_or_its_folder_is_described(file: Path) -> None:
    for path in (file, file.parent):
        found = check_folder(path)
        assert found.gguf == file.resolve()
        assert (found.max_positions, found.eos_token_ids) == (128, (2,))
        assert found.vocabulary.size == VOCAB - 2
    assert check_folder(file).name == "tiny"


def test_a_truncated_gguf_file_is_named(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match=r"tiny\.gguf: is truncated or not a GGUF file"):
        check_folder(file)


def test_two_gguf_files_need_a_choice(file: Path) -> None:
    (file.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"2 \.gguf files"):
        check_folder(file.parent)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_gguf_model_equals_the_one_it_was_made_from(
    family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", family, num_unused=2)
    runner = load_model(EngineConfig(model=str(tmp_path), num_slots=300))
    assert capfd.readouterr() == ("", "")
    driver = Driver(runner)
    session = driver.open(20)
    session.tokens = [token % (VOCAB - 2) for token in session.tokens]
    for count in (12, 1, 7):
        driver.step(driver.rows(session, count))
    assert driver.worst_error(model) < 1e-5


def test_a_missing_package_is_told_with_the_way_to_have_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package index has a specpipe of somebody else's: the way leads through the checkout."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"need the package gguf: in specpipe's checkout, pip install '\.\[gguf\]'$"):
        check_folder(file)
