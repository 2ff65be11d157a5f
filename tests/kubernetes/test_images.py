"""The Dockerfile: an image a service, small, of a known base, run by nobody in particular."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

from manifests import ROLES, ROOT

DOCKERFILE = (ROOT / "k8s/docker/Dockerfile").read_text()


def stages() -> dict[str, str]:
    """The text of each, by name."""
    parts = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {re.match(r"\S+ AS (\S+)", part).group(1): part for part in parts}  # type: ignore[union-attr]


def lineage(stage: str) -> str:
    """Everything that goes into a stage's image by FROM."""
    text = stages()[stage]
    parent = text.split()[0]
    return (lineage(parent) if parent in stages() else "") + text


def test_each_service_has_a_stage_that_runs_it_as_no_root() -> None:
    for role in ROLES:
        text = lineage(role)
        assert "USER 10001" in text
        assert 'ENTRYPOINT ["specpipe"]' in text
        assert f'CMD ["{role}", "--help"]' in text


def test_the_base_is_pinned_and_the_same_for_all() -> None:
    foreign = {text.split()[0] for text in stages().values()} - set(stages())
    assert len(foreign) == 1
    tag = foreign.pop().partition(":")[2]
    assert re.fullmatch(r"3\.\d+-slim-\w+", tag), tag


def test_a_coordinator_is_made_without_torch_and_workers_with_it() -> None:
    assert "COPY --from=without-torch" in stages()["coordinator"]
    assert "TORCH" not in lineage("without-torch")
    assert "pip install --no-deps ." in stages()["without-torch"]
    assert "COPY --from=with-torch" in lineage("target-worker")
    assert "COPY --from=with-torch" in lineage("draft-worker")


def test_what_is_installed_first_is_every_dependency_but_torch() -> None:
    """The very line of the Dockerfile, run here."""
    program = re.search(r"RUN python -c '(.+)' > requirements", DOCKERFILE)
    assert program is not None
    done = subprocess.run(
        [sys.executable, "-c", program.group(1)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = set(needed) - set(done.stdout.splitlines())
    assert torch.startswith("torch>=")
    assert f'ARG TORCH="{torch}"' in DOCKERFILE


def test_everything_that_is_copied_is_sent_to_the_builder() -> None:
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE)
        for word in line.split()
    }
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert f"!{path}" in sent, path
