"""The generated code is what the .proto files give."""

import importlib.util
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from specpipe.rpc.v1 import common_pb2, draft_pb2, generate_pb2, target_pb2, worker_pb2

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = (common_pb2, draft_pb2, generate_pb2, target_pb2, worker_pb2)


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("proto_generate", REPOSITORY / "proto" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["proto_generate"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["proto_generate"]


def test_sources_and_generated_files_have_the_recorded_digests(generator):
    folder = REPOSITORY / generator.PACKAGE
    assert generator.digests(folder) == (folder / generator.DIGESTS).read_text(), "run `make proto`"


def test_a_changed_source_is_noticed(generator, tmp_path, monkeypatch):
    folder = tmp_path / generator.PACKAGE
    folder.mkdir(parents=True)
    for path in (REPOSITORY / "proto" / generator.PACKAGE).glob("*.proto"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "common.proto").write_text((folder / "common.proto").read_text() + "\n// changed\n")
    monkeypatch.setattr(generator, "PROTO_ROOT", tmp_path)
    recorded = REPOSITORY / generator.PACKAGE
    assert generator.digests(recorded) != (recorded / generator.DIGESTS).read_text()


def test_regeneration_changes_nothing(generator, tmp_path):
    if not generator.has_tools():
        pytest.skip("the tools are not here; `make proto` fetches them")
    generated = generator.generate(tmp_path, generator.tools_python())
    assert generator.differences(generated, REPOSITORY / generator.PACKAGE) == []


def test_the_code_was_made_for_the_oldest_runtime():
    text = Path(worker_pb2.__file__).read_text()
    assert "Protobuf Python Version: 6.33.5" in text
    grpc_text = Path(draft_pb2.__file__).with_name("draft_pb2_grpc.py").read_text()
    assert "GRPC_GENERATED_VERSION = '1.81.1'" in grpc_text


def test_the_wire_has_no_untyped_bytes():
    for file in FILES:
        for name, message in file.DESCRIPTOR.message_types_by_name.items():
            for field in message.fields:
                assert field.type != FieldDescriptor.TYPE_BYTES, f"{name}.{field.name}"


def test_token_ids_are_packed_unsigned_numbers():
    for message, field in (
        (worker_pb2.Open, "tokens"),
        (worker_pb2.Extension, "tokens"),
        (worker_pb2.Commit, "tokens"),
        (generate_pb2.TokenIds, "ids"),
        (generate_pb2.Chunk, "token_ids"),
    ):
        descriptor = message.DESCRIPTOR.fields_by_name[field]
        assert descriptor.type == FieldDescriptor.TYPE_UINT32
        assert descriptor.is_packed


def test_every_sampling_option_knows_whether_it_is_set():
    for field in generate_pb2.SamplingOptions.DESCRIPTOR.fields:
        if field.name not in ("stop", "stop_token_ids"):
            assert field.has_presence, field.name


def test_enums_begin_with_unspecified_and_carry_their_name():
    for file in FILES:
        for name, enum in file.DESCRIPTOR.enum_types_by_name.items():
            prefix = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in name).strip("_")
            assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
            assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


def test_both_worker_services_have_the_same_shape():
    draft, target = (
        draft_pb2.DESCRIPTOR.services_by_name["DraftService"],
        target_pb2.DESCRIPTOR.services_by_name["TargetService"],
    )
    shapes = [
        {
            method.name: [
                [
                    (field.name, field.number, field.message_type and field.message_type.full_name)
                    for field in message.fields
                ]
                for message in (method.input_type, method.output_type)
            ]
            for method in service.methods
        }
        for service in (draft, target)
    ]
    assert shapes[0] == shapes[1]
