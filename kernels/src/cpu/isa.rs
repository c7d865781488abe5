//! Instruction sets as proofs: an [`Isa`] value exists only on a CPU that can run it.
//!
//! The SIMD variants carry a token that only detection makes, so no kernel has to check again
//! and no caller can name an instruction set the CPU lacks.

use super::error::KernelError;

/// What a proof holds: nothing, or on other architectures something that cannot exist.
#[cfg(target_arch = "x86_64")]
type Proof = ();
#[cfg(not(target_arch = "x86_64"))]
type Proof = std::convert::Infallible;

/// Proof that this CPU has AVX-512 F, BW, VL, DQ, VNNI (and AVX2, FMA, F16C).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512(Proof);

/// Proof that this CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(Proof);

/// The instruction set the kernels run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with VNNI; quantized weights times 8-bit activations.
    Avx512(Avx512),
    /// AVX2 with FMA and F16C; quantized weights times 8-bit activations.
    Avx2(Avx2),
    /// Plain Rust: dequantized weights, activations as they are. Slow, and the reference.
    Scalar,
}

impl Isa {
    /// The best instruction set of this CPU.
    pub fn detect() -> Self {
        if let Some(token) = Avx512::detect() {
            Self::Avx512(token)
        } else if let Some(token) = Avx2::detect() {
            Self::Avx2(token)
        } else {
            Self::Scalar
        }
    }

    /// Every instruction set this CPU can run, the best first. For tests and benches.
    pub fn available() -> Vec<Self> {
        let simd = [
            Avx512::detect().map(Self::Avx512),
            Avx2::detect().map(Self::Avx2),
        ];
        simd.into_iter().flatten().chain([Self::Scalar]).collect()
    }

    /// Reads `auto`, `avx512`, `avx2` or `scalar`.
    ///
    /// # Errors
    /// [`KernelError::UnknownIsa`] for another name, [`KernelError::IsaUnavailable`] when this
    /// CPU lacks it.
    pub fn parse(name: &str) -> Result<Self, KernelError> {
        let unavailable = |wanted| KernelError::IsaUnavailable {
            wanted,
            best: Self::detect().name(),
        };
        match name {
            "auto" => Ok(Self::detect()),
            "avx512" => Avx512::detect()
                .map(Self::Avx512)
                .ok_or_else(|| unavailable("avx512")),
            "avx2" => Avx2::detect()
                .map(Self::Avx2)
                .ok_or_else(|| unavailable("avx2")),
            "scalar" => Ok(Self::Scalar),
            _ => Err(KernelError::UnknownIsa { name: name.into() }),
        }
    }

    /// The name [`Isa::parse`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Avx512(_) => "avx512",
            Self::Avx2(_) => "avx2",
            Self::Scalar => "scalar",
        }
    }

    /// Names the arithmetic: pages computed under one id may be read under the same id only.
    ///
    /// It changes whenever a kernel changes an accumulation order or a rounding.
    pub const fn numerics_id(self) -> &'static str {
        match self {
            Self::Avx512(_) => "cpu-avx512-i8x32-2",
            Self::Avx2(_) => "cpu-avx2-i8x32-2",
            Self::Scalar => "cpu-scalar-f64-1",
        }
    }
}

/// [`Isa::numerics_id`] as a function.
pub const fn numerics_id(isa: Isa) -> &'static str {
    isa.numerics_id()
}

impl Avx512 {
    /// The proof, if this CPU has every feature the AVX-512 kernels use.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn detect() -> Option<Self> {
        let wide = std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512vl")
            && std::arch::is_x86_feature_detected!("avx512dq")
            && std::arch::is_x86_feature_detected!("avx512vnni");
        (wide && Avx2::detect().is_some()).then_some(Self(()))
    }

    /// No such instructions on this architecture.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn detect() -> Option<Self> {
        None
    }

    /// A value that cannot exist stands for any other.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn absurd<T>(self) -> T {
        match self.0 {}
    }
}

impl Avx2 {
    /// The proof, if this CPU has every feature the AVX2 kernels use.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn detect() -> Option<Self> {
        let has = std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
            && std::arch::is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

    /// No such instructions on this architecture.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn detect() -> Option<Self> {
        None
    }

    /// A value that cannot exist stands for any other.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn absurd<T>(self) -> T {
        match self.0 {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_the_first_available_set_and_every_available_name_parses() {
        assert_eq!(Isa::parse("auto").unwrap(), Isa::available()[0]);
        for isa in Isa::available() {
            assert_eq!(Isa::parse(isa.name()).unwrap(), isa);
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_choices() {
        let error = Isa::parse("neon").unwrap_err().to_string();
        assert!(error.contains("neon") && error.contains("avx2"), "{error}");
    }

    #[test]
    fn a_missing_set_is_refused_by_name() {
        if Avx512::detect().is_none() {
            let error = Isa::parse("avx512").unwrap_err().to_string();
            assert!(error.contains("avx512"), "{error}");
        }
    }
}
