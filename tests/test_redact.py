from __future__ import annotations

from pytest_kvbudget.redact import command_without_secrets, shape_without_secrets, without_secrets
from pytest_kvbudget.shape import Shape


def test_secrets_do_not_reach_records() -> None:
    kept = {"HF_HUB_OFFLINE": "1", "VLLM_CUDAGRAPH_MEM_BASE_MB": "0", "KEYBOARD": "us", "TOKENIZERS_PARALLELISM": "0"}
    gone = {"HF_TOKEN": "a", "AWS_SECRET_ACCESS_KEY": "b", "OPENAI_API_KEY": "c", "db_password": "d"}
    shown = without_secrets({**kept, **gone})
    assert {name: shown[name] for name in kept} == kept
    assert {shown[name] for name in gone} == {"<removed>"}


def test_secrets_do_not_reach_recorded_commands() -> None:
    argv = (
        "vllm",
        "serve",
        "m",
        "--api-key",
        "abc",
        "--hf-token=def",
        "--max-num-batched-tokens",
        "2048",
        "--port",
        "1",
    )
    assert command_without_secrets(argv) == (
        "vllm",
        "serve",
        "m",
        "--api-key",
        "<removed>",
        "--hf-token=<removed>",
        "--max-num-batched-tokens",
        "2048",
        "--port",
        "1",
    )


def test_secrets_do_not_reach_recorded_shapes() -> None:
    shape = Shape(model="m", env={"HF_TOKEN": "a", "A": "1"}, extra_args=("--api-key", "b", "--x"))
    assert shape_without_secrets(shape) == Shape(
        model="m", env={"HF_TOKEN": "<removed>", "A": "1"}, extra_args=("--api-key", "<removed>", "--x")
    )
