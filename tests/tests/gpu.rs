//! What only a device can show, and the same on the emulated driver, so that it is known to run:
//! attention and its pages against the CPU, and the rates of the kernels.
//!
//! `cargo test -p rootstock-tests --test gpu -- --nocapture` on a machine with a device prints the
//! table of `rootstock bench kernels`. Without a device, and without g++ to emulate one, the tests
//! say that they were skipped.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    reason = "helpers of tests"
)]

#[path = "../../kernels/tests/cuda/case.rs"]
#[expect(dead_code, reason = "random steps are run whole here")]
mod case;
#[path = "../../kernels/tests/cuda/mock.rs"]
mod mock;

use case::{Case, Rng};
use mock::{Variant, on_mock};
use rootstock_kernels::cuda::{Device, KvFormat, MeasureSizes, Numerics, measure};

const SMALL: Variant = Variant {
    head_dims: &[64],
    kv_types: &[0, 1, 2, 3, 4],
    sanitized: false,
    fault: None,
};

fn device() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// Random steps of every type against the CPU; on a device exponentials are approximate.
fn compare(device: &Device, dims: &[u32], count: u64) {
    for format in KvFormat::ALL {
        for numerics in [Numerics::Invariant, Numerics::Fast] {
            let tiled = numerics == Numerics::Fast && format != KvFormat::F32;
            let bound = match (tiled, format) {
                (false, _) => 1e-4,
                (true, KvFormat::Bf16) => 4e-2,
                (true, _) => 6e-3,
            };
            let mut most = 0.0_f32;
            for seed in 0..count {
                let mut rng = Rng(seed);
                let dim = dims[seed as usize % dims.len()];
                let case = Case::random(&mut rng, dim, format, numerics);
                let errors = case.run(device, &mut rng);
                // Comparisons that a NaN fails.
                let within = errors.attention <= bound
                    && errors.queries <= 1e-4
                    && errors.stored <= case::store_bound(format);
                assert!(within, "seed {seed}: {errors:?} {case:?}");
                most = most.max(errors.attention);
            }
            println!("    {numerics:?} {format:?}: {count} steps, largest error {most:.1e}");
        }
    }
}

fn rates(device: &Device, sizes: &MeasureSizes) {
    let measured = measure(device, sizes, None).unwrap();
    let copy = measured.copy.gigabytes_per_second();
    println!("    {}: copy {copy:.0} GB/s", measured.device);
    // Two of them of cuBLASLt, where it is installed.
    assert!([16, 18].contains(&measured.figures.len()));
    for figure in &measured.figures {
        let (rate, operations) = (figure.gigabytes_per_second(), figure.teraflops());
        println!(
            "    {}: {} ns, {rate:.0} GB/s, {:.0} % of the copy, {operations:.1} TFLOP/s",
            figure.name,
            figure.ns,
            100.0 * rate / copy
        );
        assert!(figure.ns > 0, "{figure:?}");
    }
    let hidden = measured.overlap_percent;
    println!("    copies beside attention: {hidden} % hidden");
    assert!(hidden <= 100);
}

#[test]
fn random_steps_of_a_device_are_those_of_the_cpu() {
    if let Some(device) = device() {
        compare(&device, &[64, 80, 96, 128, 256], 100);
    }
}

#[test]
fn rates_of_a_device_are_measured() {
    if let Some(device) = device() {
        rates(&device, &MeasureSizes::CARD);
    }
}

#[test]
fn the_comparison_runs_on_the_mock_driver() {
    if on_mock("the_comparison_runs_on_the_mock_driver", &SMALL) {
        compare(&Device::open(0).unwrap(), &[64], 1);
    }
}

#[test]
fn the_measurement_runs_on_the_mock_driver() {
    if on_mock("the_measurement_runs_on_the_mock_driver", &SMALL) {
        rates(&Device::open(0).unwrap(), &MeasureSizes::SMALL);
    }
}
