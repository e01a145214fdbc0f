use std::collections::BTreeMap;
use std::time::Duration;
use dsv4_kernels::kernel_params;
use dsv4_kernels::runtime::*;
use dsv4_kernels::runtime::params::DeviceAddress;
use dsv4_kernels::runtime::emulator::EmulatorOptions;

kernel_params! { struct P { x: DeviceAddress, y: DeviceAddress, count: i64, scale: f32 } }

fn device(body: &str, seed: Option<u64>) -> Device {
    let mut files: BTreeMap<_, _> = SourceTree::embedded().files().clone();
    files.insert("t.cu".into(), format!("#include \"platform.h\"\nstruct P {{ const float* x; float* y; int64_t count; float scale; }};\nPARAMS_LAYOUT(P, x, y, count, scale)\nKERNEL(t, P, 256) {{ {body} }}\n"));
    let tree = SourceTree::from_files("test".into(), files).unwrap();
    Device::open(BackendKind::Emulator, DeviceOptions { tree, emulator: EmulatorOptions { schedule_seed: seed, time_limit: Duration::from_secs(2) }, ..Default::default() }).unwrap()
}
fn run(body: &str, seed: Option<u64>, n: usize) -> Result<Vec<f64>> {
    let d = device(body, seed);
    let mut arena = DeviceArena::new(&d, Contract::NAN);
    let x = HostTensor::from_f64(DType::F32, &[n], &(0..n).map(|i| i as f64).collect::<Vec<_>>());
    let x = arena.input("x", &x)?;
    let y = arena.output("y", DType::F32, &[n])?;
    let v = arena.run(|d| {
        let k = d.kernel::<P>("t.cu", &[], "t")?;
        k.launch(LaunchConfig::linear("t", "x", n.div_ceil(256) as u64, 256)?, &P { x: DeviceAddress(x.address), y: DeviceAddress(y.address), count: n as i64, scale: 2.0 })
    })?;
    println!("{v:?}");
    Ok(arena.download(&y)?.to_f64())
}
#[test]
fn scale() {
    let body = "int64_t i = int64_t(blockIdx.x)*blockDim.x+threadIdx.x; __shared__ float s[256]; s[threadIdx.x] = i < params.count ? params.x[i] : 0.0f; __syncthreads(); float v = s[threadIdx.x ^ 33]; v = __shfl_xor_sync(FULL_WARP, v, 1); if (i < params.count) params.y[i] = params.scale * v;";
    for seed in [None, Some(1), Some(2)] {
        let y = run(body, seed, 512).unwrap();
        for i in 0..512 { assert_eq!(y[i], 2.0 * (i ^ 32) as f64); }
    }
    let t = std::time::Instant::now(); run(body, None, 256*1000).unwrap(); println!("{:?}", t.elapsed());
    println!("{:?}", run("params.y[params.count + threadIdx.x] = 1;", None, 300).map(|_|()));
    println!("{:?}", run("if (threadIdx.x==7) params.y[threadIdx.x] = params.x[-300000];", None, 300).map(|_|()));
    println!("{:?}", run("if (threadIdx.x > 3) __syncthreads();", None, 300).map(|_|()));
    println!("{:?}", run("if (threadIdx.x == 3) return; __syncwarp();", None, 300).map(|_|()));
    println!("{:?}", run("volatile int a = 1; while (a) {}", None, 300).map(|_|()));
    println!("{:?}", run("while (1) __syncthreads();", None, 300).map(|_|()));
    println!("{:?}", run("syntax error", None, 300).map(|_|()).map_err(|e| e.to_string()));
}
