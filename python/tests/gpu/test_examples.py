"""Each example of a kernel in a test passes where its libraries are, and is skipped elsewhere."""

import pathlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
pytest_plugins = ["pytester"]


@pytest.mark.parametrize("library", ["numpy", "torch", "triton", "cuda", "tilelang"])
def test_the_example_passes(library, pytester):
    pytester.makepyfile(test_example=(EXAMPLES / f"{library}_rms_norm.py").read_text())
    outcomes = pytester.runpytest_subprocess("-rs").parseoutcomes()
    if set(outcomes) <= {"skipped", "warnings"}:
        pytest.skip(f"{library} cannot be used here")
    assert outcomes.get("passed", 0) >= 2, outcomes
    assert not {"failed", "errors", "error"} & set(outcomes), outcomes
