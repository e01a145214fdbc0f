"""The command `parity`, run by the interpreter."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

CASE = {
    "operator": "rms_norm",
    "num_rows": 5,
    "width": 512,
    "dtype": "bf16",
    "weight": "f32",
    "eps": 1e-6,
    "aliasing": "out_of_place",
    "zero_rows": False,
    "saves_rstd": True,
    "distribution": "normal",
    "magnitude": 1.0,
    "seed": 1,
}


def parity(*words, **options):
    script = shutil.which("parity")
    assert script, "the wheel has a script `parity`"
    return subprocess.run([script, *words], capture_output=True, text=True, **options)


def test_the_script_and_the_module_are_the_same_command():
    by_module = subprocess.run(
        [sys.executable, "-m", "dsv4_parity", "--version"], capture_output=True, text=True
    )
    assert by_module.stdout.startswith("parity 0.1.0")
    assert parity("--version").stdout == by_module.stdout


def test_a_case_is_compiled_run_and_judged_in_workers_of_the_interpreter():
    replayed = parity("replay", "--backend", "emulator", json.dumps(CASE))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "1 case agreed" in replayed.stdout


def test_a_case_of_a_wrong_kernel_disagrees_and_the_kernels_are_those_of_a_folder(tmp_path):
    root = os.path.join(os.path.dirname(__file__), "..", "..", "kernels", "cuda")
    shutil.copytree(root, tmp_path / "cuda")
    source = tmp_path / "cuda" / "projections" / "rms_norm.cu"
    text = source.read_text()
    assert "params.eps" in text
    source.write_text(text.replace("params.eps", "1.0f"))
    kernels = str(tmp_path / "cuda")
    replayed = parity("replay", "--backend", "emulator", "--kernels", kernels, json.dumps(CASE))
    assert replayed.returncode == 1, replayed.stdout + replayed.stderr


def test_a_sweep_in_several_processes_starts_the_interpreter_again(tmp_path):
    sweep = ["run", "--ops", "scale_swizzle", "--backend", "emulator", "--workers", "2"]
    swept = parity(*sweep, "--cases", "1", "--edge-cases", "2", "--out", "out", cwd=tmp_path)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["command"].startswith("parity run --ops scale_swizzle")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["run", "--ops", "rms_nrom"], 2, "did you mean `rms_norm`?"),
        (["--no-such-option"], 2, "--no-such-option"),
        (["replay", "{"], 2, "malformed case"),
    ],
)
def test_bad_input_ends_as_it_does_without_python(words, code, text):
    ended = parity(*words)
    assert (ended.returncode, text in ended.stderr) == (code, True), ended.stderr


def test_an_interrupt_ends_the_command(tmp_path):
    command = [shutil.which("parity"), "run", "--backend", "emulator", "--ops", "topk"]
    running = subprocess.Popen(
        [*command, "--profile", "quick", "--out", "out"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    # From its first record on it listens.
    while not (tmp_path / "out" / "records.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=20)
    assert running.returncode == 130, errors
    assert "interrupted" in errors
