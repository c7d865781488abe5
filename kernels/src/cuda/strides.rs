//! Pages of a copy whose places on both sides follow each other by equal steps: one strided copy.

use rootstock_memory::PageId;

/// The widest step in bytes that the driver is asked for: devices say 2 GiB less one.
const STEP_BYTES_MAX: usize = i32::MAX as usize;

/// Pages `there + i * there_step` of a device and `here + i * here_step` of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) there: PageId,
    pub(super) here: PageId,
    pub(super) there_step: usize,
    pub(super) here_step: usize,
    pub(super) count: usize,
}

/// The steps from one pair of pages to another; None: they lie in different orders, or too far
/// apart.
fn steps(
    from: (PageId, PageId),
    to: (PageId, PageId),
    page_bytes: usize,
) -> Option<(usize, usize)> {
    let there = to.0.index().checked_sub(from.0.index())?;
    let here = to.1.index().checked_sub(from.1.index())?;
    let fits = |step: usize| step > 0 && step.saturating_mul(page_bytes) <= STEP_BYTES_MAX;
    (fits(there) && fits(here)).then_some((there, here))
}

/// Pairs of pages as runs; in whatever order, because the bytes of one do not depend on another.
pub(super) fn runs(there: &[PageId], here: &[PageId], page_bytes: usize) -> Vec<Run> {
    let mut pairs: Vec<(PageId, PageId)> =
        there.iter().copied().zip(here.iter().copied()).collect();
    pairs.sort_unstable();
    let mut found: Vec<Run> = Vec::new();
    let mut last = None;
    for pair in pairs {
        let step = last.and_then(|last| steps(last, pair, page_bytes));
        last = Some(pair);
        match (found.last_mut(), step) {
            (Some(run), Some((there_step, here_step)))
                if run.count == 1 || (run.there_step, run.here_step) == (there_step, here_step) =>
            {
                (run.there_step, run.here_step) = (there_step, here_step);
                run.count += 1;
            }
            _ => found.push(Run {
                there: pair.0,
                here: pair.1,
                there_step: 0,
                here_step: 0,
                count: 1,
            }),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(ids: &[u32]) -> Vec<PageId> {
        ids.iter().map(|id| PageId::new(*id)).collect()
    }

    fn counts(there: &[u32], here: &[u32], page_bytes: usize) -> Vec<usize> {
        let (there, here) = (pages(there), pages(here));
        let found = runs(&there, &here, page_bytes);
        let mut named: Vec<(usize, usize)> = Vec::new();
        for run in &found {
            let at = |i: usize| {
                let (there, here) = (run.there.index(), run.here.index());
                (there + i * run.there_step, here + i * run.here_step)
            };
            named.extend((0..run.count).map(at));
        }
        named.sort_unstable();
        let mut all: Vec<(usize, usize)> = there
            .iter()
            .zip(&here)
            .map(|(there, here)| (there.index(), here.index()))
            .collect();
        all.sort_unstable();
        assert_eq!(named, all, "each pair once");
        found.iter().map(|run| run.count).collect()
    }

    #[test]
    fn neighbors_are_one_copy_and_each_pair_is_in_one_run() {
        assert_eq!(counts(&[4, 5, 6, 7], &[9, 10, 11, 12], 64), [4]);
        assert_eq!(counts(&[7, 6, 5], &[12, 11, 10], 64), [3]);
        assert_eq!(counts(&[1, 3, 5, 9], &[2, 3, 4, 8], 64), [3, 1]);
        assert_eq!(counts(&[1, 2, 3], &[9, 8, 7], 64), [1, 1, 1]);
        assert_eq!(counts(&[1, 2, 9, 4], &[5, 1, 7, 3], 64), [1, 2, 1]);
        assert_eq!(counts(&[], &[], 64), [0_usize; 0]);
        // A step of more than the driver takes.
        assert_eq!(counts(&[1, 3], &[1, 2], 1 << 30), [1, 1]);
    }
}
