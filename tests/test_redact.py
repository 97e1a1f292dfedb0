from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.config import LoadedTarget, Target
from pytest_kvbudget.redact import (
    Scrubber,
    command_without_secrets,
    secret_values,
    text_without_secrets,
    without_secrets,
)
from pytest_kvbudget.shape import Shape


def test_secrets_do_not_reach_records() -> None:
    kept = {"HF_HUB_OFFLINE": "1", "VLLM_CUDAGRAPH_MEM_BASE_MB": "0", "KEYBOARD": "us", "TOKENIZERS_PARALLELISM": "0"}
    gone = {"HF_TOKEN": "a", "AWS_SECRET_ACCESS_KEY": "b", "OPENAI_API_KEY": "c", "db_password": "d"}
    kept |= {"VLLM_MAX_TOKENS": "8", "TOKENIZER": "m", "tokenizer_mode": "auto", "max_num_batched_tokens": "1"}
    gone |= {"PGPASSWORD": "e", "MY_APITOKEN": "f", "S3_SECRETKEY": "g", "VLLM_API_KEYS": "h"}
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
    assert shape.redacted() == Shape(
        model="m", env={"HF_TOKEN": "<removed>", "A": "1"}, extra_args=("--api-key", "<removed>", "--x")
    )


def test_reprs_and_descriptions_show_no_secret() -> None:
    shape = Shape(model="m", env={"HF_TOKEN": "abc-secret"}, extra_args=("--api-key", "def-secret"))
    target = Target(backend="vllm", env={"API_KEY": "ghi-secret"}, shape=shape, command=("x", "--password=jkl-secret"))
    loaded = LoadedTarget(name="t", target=target, origin="o", folder="/", environment={"API_KEY": "ghi-secret"})
    for shown in (repr(shape), shape.describe(), repr(target), repr(loaded)):
        assert "secret" not in shown.replace("<removed>", "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("error: unrecognized arguments: --api-key sk-top", "error: unrecognized arguments: --api-key <removed>"),
        ("--hf-token=abc --port 1", "--hf-token=<removed> --port 1"),
        (
            "non-default args: {'api_key': ['abc'], 'port': 1}",
            "non-default args: {'api_key': ['<removed>'], 'port': 1}",
        ),
        ("HF_TOKEN=abc vllm serve", "HF_TOKEN=<removed> vllm serve"),
        ("unrecognized arguments: --api-key 12", "unrecognized arguments: --api-key <removed>"),
        ("{'hf_token': 'abc', 'num_token': 12}", "{'hf_token': '<removed>', 'num_token': 12}"),
        ("KV cache bytes per token: 7701", "KV cache bytes per token: 7701"),
        ("kv_b_per_token=7701.5 key: value", "kv_b_per_token=7701.5 key: value"),
        ("--max-num-batched-tokens 2048, 401,408 tokens", "--max-num-batched-tokens 2048, 401,408 tokens"),
        ("KeyError: 'model.layers.0'", "KeyError: 'model.layers.0'"),
        ("vllm serve --api-key one two --port 1", "vllm serve --api-key <removed> <removed> --port 1"),
        ("--api-key 'a b' \"c\" -tp 2", "--api-key '<removed>' \"<removed>\" -tp 2"),
        (
            "['serve', '--api-key', 'one', 'two', '--port', '1']",
            "['serve', '--api-key', '<removed>', '<removed>', '--port', '1']",
        ),
        ("{'api_key': ['one', 'two'], 'port': 1}", "{'api_key': ['<removed>', '<removed>'], 'port': 1}"),
        ("--api-key=-one --port 1", "--api-key=<removed> --port 1"),
        ("--hf-token one is wrong", "--hf-token <removed> is wrong"),
        ("--env HF_TOKEN=one x", "--env HF_TOKEN=<removed> x"),
        ("VLLM_API_KEYS=one,two vllm", "VLLM_API_KEYS=<removed> vllm"),
        (
            "PGPASSWORD=one MY_APITOKEN=two S3_SECRETKEY=three",
            "PGPASSWORD=<removed> MY_APITOKEN=<removed> S3_SECRETKEY=<removed>",
        ),
        ('--hf-overrides \'{"hf_token": "x"}\' --port 1', '--hf-overrides \'{"hf_token": "<removed>"}\' --port 1'),
        ('--hf-overrides {"hf_token":"x y"}', '--hf-overrides {"hf_token":"<removed>"}'),
        ('--hf-overrides "{\\"hf_token\\": \\"x\\"}"', '--hf-overrides "{\\"hf_token\\": \\"<removed>\\"}"'),
        ("--hf-overrides.hf_token x --port 1", "--hf-overrides.hf_token <removed> --port 1"),
        ("{'credentials': {'user': 'x'}, 'port': 1}", "{'credentials': <removed>, 'port': 1}"),
        ("{'api_key': 'cut off here", "{'api_key': '<removed>"),
        ("{'api_key': None, 'tokenizer_mode': 'auto'}", "{'api_key': None, 'tokenizer_mode': 'auto'}"),
        (
            "tokenizer='m', max_num_batched_tokens=2048, keyword='x'",
            "tokenizer='m', max_num_batched_tokens=2048, keyword='x'",
        ),
        ("kv_b_per_token=7701.5,free=3", "kv_b_per_token=7701.5,free=3"),
    ],
)
def test_secrets_in_running_text(text: str, shown: str) -> None:
    assert text_without_secrets(text) == shown


WORDS = ("hunter22", "unt", "tersec", "\n", "x", "hunter")


@given(st.lists(st.integers(1, 7), max_size=30), st.lists(st.sampled_from(WORDS), max_size=40))
def test_scrubbing_does_not_depend_on_chunks(cuts: list[int], words: list[str]) -> None:
    data = "".join(words).encode()
    scrubber, found, at = Scrubber(["hunter22", "tersec"]), b"", 0
    for size in [*cuts, len(data)]:
        found += scrubber.feed(data[at : at + size])
        at += size
    found += scrubber.flush()
    whole = Scrubber(["hunter22", "tersec"])
    assert found == whole.feed(data) + whole.flush()
    assert b"hunter22" not in found
    assert found.count(b"\n") == data.count(b"\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"error: unrecognized arguments: --api-key abc\n", b"error: unrecognized arguments: --api-key <removed>\n"),
        (b"--api_key=abc --port 1", b"--api_key=<removed> --port 1"),
        (b"{'api_key': ['abc'], 'x': 'abc'}\n", b"{'api_key': ['<removed>'], 'x': 'abc'}\n"),
        (b"API_KEY=abc\nabc\n", b"API_KEY=<removed>\nabc\n"),
        (b"--api-key abcd keyabc abc", b"--api-key abcd keyabc abc"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_short_secret_goes_where_its_name_stands_before_it(text: bytes, shown: bytes, size: int) -> None:
    scrubber = Scrubber(["abc"])
    fed = b"".join(scrubber.feed(text[at : at + size]) for at in range(0, len(text), size))
    assert fed + scrubber.flush() == shown


def test_the_values_that_are_removed_are_known() -> None:
    values = secret_values(
        {"A": "1", "HF_TOKEN": "abcd"}, ("vllm", "--api-key", "efgh", "--hf-token=ijkl", "--port", "1")
    )
    assert set(values) == {"abcd", "efgh", "ijkl"}


def test_every_word_of_a_flag_of_several_is_removed() -> None:
    argv = (
        "vllm",
        "--api-key",
        "first",
        "second",
        "--port",
        "1",
        "--hf-token",
        "third",
        "model",
        "--api-key=one",
        "two",
    )
    shown = ("vllm", "--api-key", "<removed>", "<removed>", "--port", "1", "--hf-token", "<removed>", "model")
    assert command_without_secrets(argv) == (*shown, "--api-key=<removed>", "<removed>")
    assert secret_values({}, argv) == ("first", "second", "third", "one", "two")


def test_secrets_inside_of_a_word_or_of_another_variable_are_removed() -> None:
    argv = ("--hf-overrides", '{"hf_token": "inner", "max_tokens": 4}', '--hf-overrides={"a":{"hf_token":"other"}}')
    environment = {"SERVE_ARGS": "--api-key third --port 1"}
    assert command_without_secrets(argv) == (
        "--hf-overrides",
        '{"hf_token": "<removed>", "max_tokens": 4}',
        '--hf-overrides={"a":{"hf_token":"<removed>"}}',
    )
    assert without_secrets(environment) == {"SERVE_ARGS": "--api-key <removed> --port 1"}
    assert set(secret_values(environment, argv)) == {"inner", "other", "third"}


def test_several_short_secrets_go_behind_one_name() -> None:
    scrubber = Scrubber(["ab", "cd"])
    assert scrubber.feed(b"--api-key ab cd\n['--api-key', 'ab', 'cd'] cd\n") == (
        b"--api-key <removed> <removed>\n['--api-key', '<removed>', '<removed>'] cd\n"
    )
