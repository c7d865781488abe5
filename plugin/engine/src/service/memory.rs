//! How much memory the system can give.

/// Bytes of a MiB.
pub(super) const MIB: u64 = 1 << 20;
/// Device tiers where the system does not say what is free.
const DEVICE_FALLBACK: u64 = 1 << 30;
/// Largest device tiers that are taken without being asked for.
const DEVICE_MAX: u64 = 8 << 30;

/// Bytes of all device tiers together when nothing is asked for: 40 % of what is free.
pub(super) fn device_default(free: Option<u64>) -> u64 {
    free.map_or(DEVICE_FALLBACK, |free| (free / 10 * 4).min(DEVICE_MAX))
}

/// Bytes of the host tier when nothing is asked for: twice the device tiers, at most a quarter of
/// what is free; none where the system does not say.
pub(super) fn host_default(free: Option<u64>, device: u64) -> u64 {
    free.map_or(0, |free| (free / 4).min(device.saturating_mul(2)))
}

/// Left free on a CUDA device when nothing is asked for: activations, logits, and what the driver
/// takes for its code.
#[cfg(feature = "cuda")]
const CUDA_RESERVE: u64 = 1 << 30;

/// Bytes of a CUDA device's tier when nothing is asked for: nine tenths of what is free behind the
/// weights and a reserve.
#[cfg(feature = "cuda")]
pub(super) fn cuda_default(free: u64) -> u64 {
    free.saturating_sub(CUDA_RESERVE) / 10 * 9
}

/// Bytes that can be taken without swapping, where the system says so.
pub(super) fn available() -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tiers_take_shares_of_the_free_memory_within_their_caps() {
        assert_eq!(device_default(Some(1000)), 400);
        assert_eq!(device_default(Some(1 << 40)), 8 << 30);
        assert_eq!(device_default(None), 1 << 30);
        assert_eq!(host_default(Some(1000), 100), 200);
        assert_eq!(host_default(Some(1000), 400), 250);
        assert_eq!(host_default(None, 400), 0);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn a_cuda_device_keeps_a_reserve() {
        assert_eq!(cuda_default(11 << 30), 9 << 30);
        assert_eq!(cuda_default(1 << 20), 0);
    }

    #[test]
    fn available_memory_is_read_in_bytes() {
        let text = "MemTotal:  100 kB\nMemAvailable:     2048 kB\nSwapFree: 1 kB\n";
        assert_eq!(parse(text), Some(2048 * 1024));
        assert_eq!(parse("MemTotal: 1 kB\n"), None);
        assert_eq!(parse("MemAvailable: x kB\n"), None);
    }
}
