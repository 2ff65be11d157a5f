"""What a CLUSTER.yaml may say, and what is said of one that is wrong: specpipe.cluster.{config,reading}."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from specpipe.cluster.autoscale import DraftBounds, TargetBounds
from specpipe.cluster.config import ClusterConfig
from specpipe.cluster.reading import fill_cluster, read_cluster
from specpipe.errors import ConfigError
from specpipe.types import Mode

FULL = """
name: code
ray: {address: "ray://head:10001", namespace: teams}
models: {target: /models/target, draft: /models/draft, dtype: bfloat16, max_context: 8192}
requests: {mode: off, num_speculative_tokens: 8}
coordinators: {count: 2, port: 50051, host: 0.0.0.0, resources: {coordinator: 1}}
target_workers: {count: 2, tensor_parallel_size: 4, gpus: 1}
draft_workers: {count: 3, gpus: 0.25}
restarts: {first_delay_s: 2}
autoscale: {target_workers: {min: 1, max: 8}}
tls: {cert: /tls/tls.crt, key: /tls/tls.key, ca: /tls/ca.crt}
telemetry: {otlp_endpoint: "collector:4317"}
"""


def read(text: str, folder: Path) -> ClusterConfig:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return read_cluster(path)


def test_an_empty_file_is_the_demo_pair_on_a_local_ray(tmp_path: Path) -> None:
    config = read("", tmp_path)
    assert config == ClusterConfig()
    assert config.ray.is_local
    assert config.models.has_draft_model


def test_the_documentation_shows_the_defaults() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ray.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    shown = fill_cluster(yaml.safe_load(text), "ray.md")
    assert replace(shown, models=replace(shown.models, draft="")) == ClusterConfig()
    assert shown.models.drafter == ClusterConfig().models.drafter
    scaled = fill_cluster(
        yaml.safe_load(re.sub(r"^  # (\w+_workers: )", r"  \1", text, flags=re.M)), "ray.md"
    ).autoscale
    assert (scaled.draft_workers, scaled.target_workers) == (DraftBounds(), TargetBounds())
    assert set(yaml.safe_load(text)) == {field.name for field in fields(ClusterConfig)}


def test_every_section_is_read(tmp_path: Path) -> None:
    config = read(FULL, tmp_path)
    assert (config.name, config.ray.address, config.target_workers.tensor_parallel_size) == (
        "code",
        "ray://head:10001",
        4,
    )
    assert config.requests.mode is Mode.OFF, "YAML reads a bare off as false"
    assert config.coordinators.resources == {"coordinator": 1.0}
    assert config.autoscale.target_workers is not None
    assert config.autoscale.target_workers.max == 8
    assert config.tls.ca == "/tls/ca.crt"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("target_worker: {count: 2}", "target_worker is not known: did you mean target_workers?"),
        ("ray: {adress: auto}", "ray.adress is not known: did you mean address?"),
        ("draft_workers: {count: many}", "draft_workers.count must be an integer, got 'many'"),
        ("draft_workers: {count: true}", "draft_workers.count must be an integer, got True"),
        ("draft_workers: 2", "draft_workers must hold keys and values, got 2"),
        ("[1, 2]", "the file must hold keys and values"),
        ("name: [a", "is not YAML"),
        ("requests: {mode: fast}", "requests.mode must be off, sync or pipelined, got 'fast'"),
        ("target_workers: {placement: PILE}", "target_workers.placement must be STRICT_PACK, PACK, SPREAD"),
        ("coordinators: {resources: {A: lots}}", "coordinators.resources.A must be a number, got 'lots'"),
        ("target_workers: {count: 0}", "target_workers.count must be at least 1, got 0"),
        ("ray: {address: everywhere}", "ray.address must be local, auto, HOST:PORT or ray://HOST:PORT"),
        ("draft_workers: {gpus: 1.5}", "draft_workers.gpus must be a whole number or less than 1"),
        ("draft_workers: {cpus: 0}", "draft_workers.cpus must be more than 0"),
        ("target_workers: {resources: {GPU: 1}}", "target_workers.resources: GPU is given as gpus"),
        ("restarts: {first_delay_s: 60}", "restarts.first_delay_s must be more than 0 and at most max_delay_s"),
        ("autoscale: {draft_workers: {min: 3, max: 2}}", "autoscale.draft_workers.min must be from 0 to max"),
        ("{models: {draft: ngram}, autoscale: {draft_workers: {}}}", "autoscale.draft_workers: nothing drafts"),
        ("models: {load_timeout_s: 0}", "models.load_timeout_s must be more than 0, got 0"),
        ("name: 'a/b'", "name must be of letters"),
        ("tls: {cert: a}", "tls.tls_cert and tls_key are given together"),
        ("name: a\nname: b", "'name' is given twice"),
        ("coordinators: {count: 1, count: 2}", "'count' is given twice"),
        ("name: " + 5000 * "[" + 5000 * "]", "nested too deeply"),
        ("coordinators: {count: " + 6000 * "9" + "}", "is not YAML: Exceeds the limit"),
        ("name: 2020-99-99", "is not YAML: month must be in 1..12"),
        ("grace_s: .nan", "grace_s must be a number, got nan"),
        ("grace_s: -.inf", "grace_s must be a number, got -inf"),
        ("coordinators: {cpus: " + 400 * "9" + "}", "coordinators.cpus must be a number, got 999"),
        ("coordinators: {cpus: 1.0e+300}", "coordinators.cpus must be from 0 to 1000000, got 1e+300"),
        ("draft_workers: {count: 1000000000000}", "draft_workers.count must be at most 1000, got 1000000000000"),
        ("target_workers: {tensor_parallel_size: 5000}", "tensor_parallel_size must be at most 1000, got 5000"),
        ("autoscale: {target_workers: {max: 1000000}}", "autoscale.target_workers.max must be at most 1000"),
        ("coordinators: {resources: {A: -1}}", "coordinators.resources.A must be from 0 to 1000000, got -1"),
        ("coordinators: {resources: {5: 1}}", "coordinators.resources must hold names and amounts, got the name 5"),
        ("coordinators: {resources: {'': 1}}", "coordinators.resources must hold names and amounts, got the name ''"),
        ('"na\\e[31mme": 1', r"'na\x1b[31mme' is not known"),
        (f"{1000 * 'x'}: 1", "xxx...xxx"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, tmp_path)
    assert said in str(caught.value)
    assert "cluster.yaml" in str(caught.value)


@pytest.mark.parametrize("placement", ["STRICT_PACK", "SPREAD", "STRICT_SPREAD", "PACK"])
def test_ranks_may_be_placed_as_ray_can_place_them(placement: str) -> None:
    content = {"target_workers": {"tensor_parallel_size": 8, "placement": placement}}
    assert fill_cluster(content, "cluster.yaml").target_workers.placement == placement


def test_several_ranks_have_a_whole_gpu_each() -> None:
    with pytest.raises(ConfigError, match="gpus must be 0 or 1"):
        fill_cluster({"target_workers": {"tensor_parallel_size": 2, "gpus": 0.5}}, "cluster.yaml")


def test_a_file_that_is_not_there_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_cluster(tmp_path / "cluster.yaml")


def test_a_few_lines_that_stand_for_more_than_fits_into_memory_are_refused_in_one(tmp_path: Path) -> None:
    levels = [f"&a0 [{', '.join(9 * 'x')}]", *(f"&a{i} [{', '.join(9 * [f'*a{i - 1}'])}]" for i in range(1, 12))]
    with pytest.raises(ConfigError) as caught:
        read(f"name: [{', '.join(levels)}]", tmp_path)
    assert len(str(caught.value)) < 300


def test_what_one_key_has_another_may_have_too(tmp_path: Path) -> None:
    config = read("coordinators: &both {cpus: 2, resources: {A: 1}}\ndraft_workers: {<<: *both, cpus: 3}", tmp_path)
    assert config.draft_workers.resources == config.coordinators.resources == {"A": 1.0}
    assert (config.coordinators.cpus, config.draft_workers.cpus) == (2, 3)
