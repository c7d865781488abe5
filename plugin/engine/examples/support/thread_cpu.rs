//! CPU time of the calling thread, which other work on the machine does not change.

/// Nanoseconds that this thread has run so far.
pub(crate) fn thread_cpu_ns() -> Result<u64, Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let first = text.split_whitespace().next().ok_or("no CPU time")?;
    Ok(first.parse()?)
}
