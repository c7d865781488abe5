//! The order in which cells go.

use super::class::CELLS;
use std::sync::Arc;

/// Cells in order of worth, the least first.
#[derive(Debug)]
pub(crate) struct Ranks {
    pub(super) order: Box<[u16]>,
    /// The place of each cell.
    pub(super) places: Box<[u16]>,
    /// What comes in is all of one class, so that the last use alone decides.
    pub(super) is_recency: bool,
}

impl Ranks {
    /// `order` has each cell once.
    pub(crate) fn new(order: Vec<u16>) -> Arc<Self> {
        Self::with(order, false)
    }

    /// An order that does not tell classes apart.
    pub(crate) fn of_recency(order: Vec<u16>) -> Arc<Self> {
        Self::with(order, true)
    }

    fn with(order: Vec<u16>, is_recency: bool) -> Arc<Self> {
        let mut places = vec![0; CELLS].into_boxed_slice();
        for (place, &cell) in (0..).zip(&order) {
            places[usize::from(cell)] = place;
        }
        let order = order.into();
        Arc::new(Self {
            order,
            places,
            is_recency,
        })
    }

    /// For tests of what makes an order.
    #[cfg(test)]
    pub(crate) const fn order(&self) -> &[u16] {
        &self.order
    }
}
