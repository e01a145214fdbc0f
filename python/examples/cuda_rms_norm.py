"""A norm in CUDA C++, compiled as an extension of torch, judged in a test; needs a GPU, torch and nvcc.

    pytest python/examples/cuda_rms_norm.py
"""

import shutil

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
if not (shutil.which("nvcc") and shutil.which("ninja")):
    pytest.skip("an extension needs nvcc and ninja", allow_module_level=True)

from torch.utils.cpp_extension import load_inline  # noqa: E402

from dsv4_parity.testing import cases, check  # noqa: E402

SOURCE = r"""
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

// A warp for each row.
__global__ void kernel(const float* x, const float* weight, float* y, float* rstd, int width, float eps) {
    const int row = blockIdx.x, lane = threadIdx.x;
    const float* values = x + (long long)row * width;
    float sum = 0.0f;
    for (int i = lane; i < width; i += 32) sum = fmaf(values[i], values[i], sum);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const float r = 1.0f / sqrtf(sum / width + eps);
    for (int i = lane; i < width; i += 32) y[(long long)row * width + i] = values[i] * r * weight[i];
    if (lane == 0) rstd[row] = r;
}

std::vector<torch::Tensor> forward(torch::Tensor x, torch::Tensor weight, double eps) {
    auto y = torch::empty_like(x), rstd = torch::empty({x.size(0)}, x.options());
    kernel<<<x.size(0), 32, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<float>(), weight.data_ptr<float>(), y.data_ptr<float>(), rstd.data_ptr<float>(), x.size(1), eps);
    return {y, rstd};
}
"""


@pytest.fixture(scope="module")
def extension():
    declared = "std::vector<torch::Tensor> forward(torch::Tensor x, torch::Tensor weight, double eps);"
    return load_inline("parity_example", declared, SOURCE, functions=["forward"])


@cases("rms_norm", where="dtype = 'f32' and num_rows > 0 and width <= 4096", edge_cases=4, drawn=4)
def test_extension(case, extension):
    def rms_norm(x, weight=None, eps=1e-6):
        weight = torch.ones(x.shape[1], device=x.device) if weight is None else weight
        y, rstd = extension.forward(x.contiguous(), weight, eps)
        return {"y": y, "rstd": rstd}

    check(case, forward=rms_norm, to=lambda array: torch.from_numpy(array).cuda())
