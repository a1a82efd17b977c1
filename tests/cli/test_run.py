"""Tests of `tandem run` as a process, with pipes or on a pseudo-terminal."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.generate.prompt import encode_conversation
from tests.cli.terminal import Terminal
from tests.hf.tiny import byte_tokenizer, save_half_checkpoint, save_tiny_checkpoint
from tests.programs import Program, python, tandem

JSON_KEYS = {
    *("text", "prompt_tokens", "generated_tokens", "time_to_first_token_seconds"),
    *("prefill_tokens_per_second", "decode_tokens_per_second", "device", "expert_cache"),
    *("prefetch", "memory_bytes", "peak_memory_bytes"),
}


def test_answers_a_prompt_and_prints_statistics(model: str) -> None:
    done = tandem("run", model, "-p", "hello", "--max-new-tokens", "8", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(r"first token .* s \| prefill .* tok/s \| decode", done.stderr) or re.search(
        r"first token .*prefill .*decode .*experts read .*memory", done.stderr
    )
    assert "slower than possible" not in done.stderr


def test_a_start_does_not_look_for_garbage(model: str) -> None:
    code = """if True:
        import gc
        from tandem.cli.main import main
        seen = []
        gc.callbacks.append(lambda phase, _: seen.append(phase))
        main()
        print(len(seen))
    """
    done = python(code, "run", model, "-p", "hello", "--max-new-tokens", "2", imports="pass")
    assert done.stdout.splitlines()[-1] == "0", done.stderr


def test_a_model_that_keeps_states_says_why_it_is_slower(tmp_path: Path) -> None:
    padded = str(save_half_checkpoint(tmp_path / "padded"))
    done = tandem("run", padded, "-p", "hello", "--max-new-tokens", "8", "--temperature", "0")
    assert "[slower than possible: steps run padded" in done.stderr


def test_last_line_is_one_json_object(model: str) -> None:
    done = tandem("run", model, "-p", "hello", "--max-new-tokens", "8", "--json", "--seed", "1")
    *text, last = done.stdout.splitlines()
    report = json.loads(last)
    assert set(report) >= JSON_KEYS
    assert report["text"] == "\n".join(text)
    assert report["generated_tokens"] == 8
    assert report["experts_read_bytes"] > 0
    assert report["expert_cache"]["misses"] > 0
    # The system updates the two at different times.
    assert 0 < report["memory_bytes"]["host"] < 1.1 * report["peak_memory_bytes"]["host"]


@pytest.mark.parametrize(
    ("prompt", "words", "reason", "message"),
    [
        ("hello", ["--max-new-tokens", "8"], "length", "it has 8 tokens, as many as --max-new"),
        ("x" * 200, [], "context", "the model's context of 256 tokens is full"),
        ("hello", ["--stop", "{first}"], "stop", ""),
    ],
)
def test_an_answer_that_was_cut_says_so(
    model: str, prompt: str, words: list[str], reason: str, message: str
) -> None:
    flags = ("run", model, "--temperature", "0", "--json")
    first = tandem(*flags, "-p", prompt, "--max-new-tokens", "1").stdout[0]
    done = tandem(*flags, "-p", prompt, *(word.format(first=first) for word in words))
    assert json.loads(done.stdout.splitlines()[-1])["finish_reason"] == reason
    assert ("the answer is cut off" in done.stderr) == (reason != "stop")
    assert message in done.stderr


def test_quiet_prints_the_answer_only(model: str) -> None:
    done = tandem("run", model, "-p", "hello", "--max-new-tokens", "8", "--quiet")
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize(("words", "num_lines"), [([], 1), (["--quiet"], 0)])
def test_a_warning_is_one_line_and_none_when_quiet(
    tmp_path: Path, words: list[str], num_lines: int
) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny")
    (checkpoint / "generation_config.json").write_text('{"num_beams": 4}')
    done = tandem("run", str(checkpoint), "-p", "x", "--max-new-tokens", "1", *words)
    warned = [line for line in done.stderr.splitlines() if "num_beams" in line]
    assert len(warned) == num_lines
    assert all(line.startswith("[warning: the model's generation config") for line in warned)
    assert ".py" not in done.stderr


def test_reads_a_pipe_as_the_prompt(model: str) -> None:
    flags = ("--max-new-tokens", "8", "--seed", "1", "--quiet")
    piped = tandem("run", model, *flags, stdin="hello")
    assert piped.stdout == tandem("run", model, "-p", "hello", *flags).stdout != ""


def test_a_pipe_is_put_before_the_prompt(model: str) -> None:
    words = ("run", model, "-p", "summarise", "--max-new-tokens", "1", "--json")
    done = tandem(*words, stdin="a text\n")
    conversation = [{"role": "user", "content": "a text\n\nsummarise"}]
    expected = len(encode_conversation(byte_tokenizer(), conversation))
    assert json.loads(done.stdout.splitlines()[-1])["prompt_tokens"] == expected


@pytest.mark.parametrize(
    ("words", "stdin", "what"),
    [
        (["-p", "a\udcff"], "", "the prompt holds the byte 0xff after 1 characters"),
        ([], "\udcfe\udcff", "standard input holds the byte 0xfe after 0 characters"),
        (["-p", "x"], "abc\udce9", "standard input holds the byte 0xe9 after 3 characters"),
        (["-p", "x", "--system", "\udc80"], "", "--system holds the byte 0x80"),
        (["-p", "x", "--stop", "\udc80"], "", "--stop holds the byte 0x80"),
    ],
)
def test_bytes_that_are_no_text_are_one_sentence(
    model: str, words: list[str], stdin: str, what: str
) -> None:
    done = tandem("run", model, *words, stdin=stdin)
    assert done.returncode == 2
    assert f"{what}" in done.stderr
    assert "which is not UTF-8" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_same_seed_same_text(model: str) -> None:
    def sample(seed: str) -> str:
        flags = ("--max-new-tokens", "16", "--temperature", "1", "--seed", seed, "--quiet")
        return tandem("run", model, "-p", "hello", *flags).stdout

    assert sample("1") == sample("1") != sample("2")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "/no/such/model", "-p", "x"], "/no/such/model is not a directory"),
        (["run", "{model}", "-p", " "], "the prompt is empty"),
        (["run", "{model}", "-p", "x", "--expert-dtype", "bf61"], "did you mean 'bf16'"),
        (["run", "{model}", "-p", "x", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["run", "{model}", "-p", "x", "--max-new-tokens", "many"], "invalid int value"),
        (["run", "{model}", "-p", "x", "--temperature", "-1"], "temperature is -1"),
        (["run", "{model}", "-p", "x", "--tempreature", "1"], "did you mean '--temperature'"),
        (["run", "{model}", "-p", "x" * 400], "the model's context is 256"),
        (["run", "{model}", "-p", "x", "--dense-dtype", "int9"], "dense_dtype is 'int9'"),
        (["rum"], "invalid choice: 'rum'"),
        ([], "required: COMMAND"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    model: str, words: list[str], sentence: str
) -> None:
    done = tandem(*(word.format(model=model) for word in words))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda files: files[1].unlink(), "lacks model-00002"),
        (lambda files: files[1].write_bytes(files[1].read_bytes()[:-1]), "bytes, expected"),
        (lambda files: files[1].write_bytes(b"\xff" * 99), "is damaged"),
    ],
)
def test_a_damaged_checkpoint_gets_one_sentence(
    tmp_path: Path, damage: Callable[[list[Path]], object], sentence: str
) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny")
    damage(sorted(checkpoint.glob("model-*.safetensors")))
    done = tandem("run", str(checkpoint), "-p", "x")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


# Transformers makes an empty tokenizer for the first, and raises for the second
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_model_without_tokenizer_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str
) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", architecture)
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert main(["run", str(checkpoint), "-p", "x"]) == 2
    errors = capsys.readouterr().err
    assert "tiny has no tokenizer: expected tokenizer.json" in errors
    assert len(errors.splitlines()) == 1


def test_a_reader_that_leaves_is_no_error(model: str) -> None:
    words = ("run", model, "-p", "hello", "--max-new-tokens", "64", "--quiet")
    reading, writing = os.pipe()
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as errors:
        with Program(words, (nothing.fileno(), writing, errors.fileno())) as program:
            os.close(writing)
            assert os.read(reading, 1)
            os.close(reading)
            exit_code = program.wait()
        errors.seek(0)
        log = errors.read()
    assert "Traceback" not in log
    assert exit_code == 0, log


@pytest.fixture
def terminal(model: str) -> Iterator[Terminal]:
    with Terminal(["run", model, "--seed", "1", "--max-new-tokens", "200"]) as opened:
        yield opened


def test_chat_answers_and_exits(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    position = terminal.type("hello\r")
    terminal.wait_for("decode", after=position)
    terminal.wait_for("> ", after=position)
    position = terminal.type("caf\udcff\r")
    terminal.wait_for("holds the byte 0xff", after=position)
    position = terminal.type("/nonsense\r")
    terminal.wait_for("unknown command /nonsense", after=position)
    terminal.type("/exit\r")
    assert terminal.close() == 0


def test_control_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    position = terminal.type("hello\r")
    terminal.wait_for("\n", after=position)
    time.sleep(0.1)  # into the middle of the answer; where exactly does not matter
    terminal.type("\x03")
    terminal.wait_for("> ", after=position + 8)
    terminal.type("\x04")
    assert terminal.close() == 0


def test_control_c_at_the_prompt_only_drops_the_line(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    position = terminal.type("half a li")
    terminal.wait_for("half a li", after=position)
    terminal.press_until("\x03", "/exit or Ctrl-D leaves", after=position)
    terminal.type("/exit\r")
    assert terminal.close() == 0
