//! Plans are checked before they run: ids, ranges, pages and tokens.
//!
//! The scheduler never makes a bad plan; a host's adapter or a journal might. The kernels check
//! shapes again for memory safety; here the answer names the row.

use rootstock::StepError;
use rootstock::memory::PageId;
use rootstock::scheduler::{Row, RowInput, StepPlan};

/// What a plan is checked against.
pub(crate) struct Limits {
    pub(crate) vocab: u32,
    pub(crate) pages: u32,
    pub(crate) page_tokens: u32,
}

/// Refuses a plan with a row that cannot be computed.
pub(crate) fn check(plan: &StepPlan, limits: &Limits) -> Result<(), StepError> {
    for (index, row) in plan.rows.iter().enumerate() {
        if let Err(what) = check_row(plan, row, limits) {
            let message = format!("row {index}: {what}").into();
            return Err(StepError::Failed {
                step: plan.id,
                message,
            });
        }
    }
    Ok(())
}

fn check_row(plan: &StepPlan, row: &Row, limits: &Limits) -> Result<(), String> {
    let tokens = plan
        .tokens
        .get(row.tokens.start as usize..row.tokens.end as usize)
        .ok_or_else(|| format!("tokens {:?} of {}", row.tokens, plan.tokens.len()))?;
    if tokens.len() != row.len as usize || tokens.is_empty() {
        return Err(format!("{} tokens for {} positions", tokens.len(), row.len));
    }
    let guesses = plan
        .tokens
        .get(row.guesses.start as usize..row.guesses.end as usize)
        .ok_or_else(|| format!("guesses {:?} of {}", row.guesses, plan.tokens.len()))?;
    if guesses.len() > usize::from(row.drafts) {
        return Err(format!(
            "{} guesses where {} may be",
            guesses.len(),
            row.drafts
        ));
    }
    let given = usize::from(row.input != RowInput::Known);
    if let Some(token) = tokens
        .iter()
        .skip(given)
        .chain(guesses)
        .find(|&&token| token >= limits.vocab)
    {
        return Err(format!("token {token} of a vocabulary of {}", limits.vocab));
    }
    let pages = plan
        .page_tables
        .get(row.pages.start as usize..row.pages.end as usize)
        .ok_or_else(|| format!("page table {:?} of {}", row.pages, plan.page_tables.len()))?;
    let positions = u64::from(row.first_pos) + u64::from(row.len) + guesses.len() as u64;
    let needed = positions.div_ceil(u64::from(limits.page_tokens));
    if (pages.len() as u64) < needed {
        return Err(format!(
            "{} pages for {positions} positions, {needed} needed",
            pages.len()
        ));
    }
    let outside = |page: &&PageId| page.get() == 0 || page.get() > limits.pages;
    if let Some(page) = pages.iter().find(outside) {
        return Err(format!("page {} of {}", page.get(), limits.pages));
    }
    Ok(())
}
