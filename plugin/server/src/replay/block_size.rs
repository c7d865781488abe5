//! How many tokens a hash id stands for: stated by request traces, and in Mooncake's form to be
//! told from the rows, as a prompt of `n` tokens has `ceil(n / size)` ids.

use super::error::ReplayError;

/// What Mooncake's traces use, taken where the rows allow it.
const USUAL_TOKENS: u32 = 512;

/// What the rows of a file say about its block size.
#[derive(Debug)]
pub(crate) struct BlockSize {
    stated: Option<u32>,
    /// No size below fits all rows so far.
    least: u64,
    /// No size above does.
    most: u64,
    /// Prompt lengths and counts of ids, to be compared with the size once it is known.
    rows: Vec<(u64, u32)>,
}

impl Default for BlockSize {
    fn default() -> Self {
        Self {
            stated: None,
            least: 1,
            most: u64::from(u32::MAX),
            rows: Vec::new(),
        }
    }
}

impl BlockSize {
    /// The row of `line` states its block size.
    ///
    /// # Errors
    /// An earlier row stated another one, or it is zero.
    pub(crate) fn state(&mut self, line: u64, tokens: u32) -> Result<(), ReplayError> {
        let before = *self.stated.get_or_insert(tokens);
        if tokens == 0 {
            let (field, wanted) = ("event.request.replay.trace_block_size", "at least 1");
            return Err(ReplayError::Field {
                line,
                field,
                found: "0".to_owned(),
                wanted,
            });
        }
        if before != tokens {
            return Err(ReplayError::MixedBlocks {
                line,
                found: tokens,
                before,
            });
        }
        Ok(())
    }

    /// A prompt of `input_tokens` has `ids` hash ids.
    pub(crate) fn observe(&mut self, input_tokens: Option<u64>, ids: usize) {
        let Some(tokens) = input_tokens else { return };
        // A line has at most 16 Mi characters, so this many ids fit.
        let ids = u32::try_from(ids).unwrap_or(u32::MAX);
        self.rows.push((tokens, ids));
        if ids >= 1 && tokens >= 1 {
            self.least = self.least.max(tokens.div_ceil(u64::from(ids)));
        }
        if ids >= 2 {
            self.most = self.most.min(tokens.saturating_sub(1) / u64::from(ids - 1));
        }
    }

    /// The block size: as stated, as `asked` by the user, or the only or usual one that fits.
    ///
    /// # Errors
    /// What is asked contradicts what is stated, or nothing decides.
    pub(crate) fn decide(&self, asked: Option<u32>) -> Result<u32, ReplayError> {
        match (self.stated, asked) {
            (Some(stated), Some(asked)) if stated != asked => {
                Err(ReplayError::PageSize { asked, stated })
            }
            (Some(tokens), _) | (None, Some(tokens)) => Ok(tokens),
            (None, None) => self.infer().ok_or(ReplayError::PageSizeUnknown),
        }
    }

    fn infer(&self) -> Option<u32> {
        let fits = |tokens: u32| (self.least..=self.most).contains(&u64::from(tokens));
        if fits(USUAL_TOKENS) {
            return Some(USUAL_TOKENS);
        }
        let mut powers = (0..31).map(|bit| 1 << bit).filter(|tokens| fits(*tokens));
        match (powers.next(), powers.next()) {
            (Some(only), None) => Some(only),
            (Some(_), Some(_)) => None,
            (None, _) if self.least == self.most => u32::try_from(self.least).ok(),
            (None, _) => None,
        }
    }

    /// Rows whose count of ids is not that of blocks of `page_tokens`.
    pub(crate) fn misfits(&self, page_tokens: u32) -> u64 {
        let size = u64::from(page_tokens);
        let misfit = |&&(tokens, ids): &&(u64, u32)| tokens.div_ceil(size) != u64::from(ids);
        self.rows.iter().filter(misfit).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[(u64, usize)]) -> BlockSize {
        let mut size = BlockSize::default();
        for &(tokens, ids) in rows {
            size.observe(Some(tokens), ids);
        }
        size
    }

    #[test]
    fn the_size_that_fits_all_rows_is_found() {
        assert_eq!(rows(&[(6758, 14), (100, 1)]).decide(None).unwrap(), 512);
        assert_eq!(rows(&[(521, 33), (17, 2)]).decide(None).unwrap(), 16);
        assert_eq!(
            rows(&[(100, 1)]).decide(None).unwrap(),
            512,
            "the usual one where many fit"
        );
        assert_eq!(
            rows(&[(48_001, 1001), (48_000, 1000)])
                .decide(None)
                .unwrap(),
            48
        );
    }

    #[test]
    fn rows_that_decide_nothing_ask_for_the_option() {
        let size = rows(&[(1000, 100), (1000, 3)]);
        assert!(matches!(
            size.decide(None),
            Err(ReplayError::PageSizeUnknown)
        ));
        assert_eq!(size.decide(Some(400)).unwrap(), 400);
        assert_eq!(size.misfits(400), 1);
        assert!(matches!(
            rows(&[(700, 1)]).decide(None),
            Err(ReplayError::PageSizeUnknown)
        ));
    }

    #[test]
    fn a_stated_size_is_not_overruled() {
        let mut size = BlockSize::default();
        size.state(1, 16).unwrap();
        assert_eq!(
            (size.decide(None).unwrap(), size.decide(Some(16)).unwrap()),
            (16, 16)
        );
        let text = size.decide(Some(64)).unwrap_err().to_string();
        assert_eq!(
            text,
            "--page-size 64: the trace itself says its blocks have 16 tokens"
        );
        let text = size.state(2, 32).unwrap_err().to_string();
        assert_eq!(
            text,
            "line 2: blocks of 32 tokens, but those before have 16"
        );
        assert!(
            size.state(3, 0)
                .unwrap_err()
                .to_string()
                .contains("is 0, expected at least 1")
        );
    }
}
