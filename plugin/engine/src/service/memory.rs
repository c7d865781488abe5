//! How much memory the system can give.

/// Bytes of a MiB.
pub(super) const MIB: u64 = 1 << 20;
/// Device tier where the system does not say what is free.
pub(super) const DEFAULT_BYTES: u64 = 1 << 30;
/// Largest device tier that is taken without being asked for.
pub(super) const DEFAULT_MAX: u64 = 8 << 30;

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
    fn available_memory_is_read_in_bytes() {
        let text = "MemTotal:  100 kB\nMemAvailable:     2048 kB\nSwapFree: 1 kB\n";
        assert_eq!(parse(text), Some(2048 * 1024));
        assert_eq!(parse("MemTotal: 1 kB\n"), None);
        assert_eq!(parse("MemAvailable: x kB\n"), None);
    }
}
