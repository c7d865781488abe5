//! Faults that can be planted in a simulation, to show that it finds them.

/// A fault of the double, to show that it would be found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Planted {
    /// None.
    Nothing,
    /// The n-th row writes nothing to its last slot.
    LostWrite(u32),
    /// The n-th row that draws drops its last token, or draws one token too many.
    WrongCount(u32),
    /// The n-th row with two pages or more finds two of them swapped in its table.
    SwappedPages(u32),
    /// The n-th row runs on the first page of another row of its step.
    ForeignPage(u32),
    /// The n-th acknowledged copy moved no bytes.
    LostCopy(u32),
    /// The n-th copy that fails is acknowledged as done.
    BelievedCopy(u32),
    /// The n-th copy up is acknowledged long before it reads its source.
    EarlyCopy(u32),
    /// The n-th pin is undone behind everybody's back. This and what follows is played by the
    /// simulator, between the core and the others.
    LostPin(u32),
    /// The n-th copy that ends is acknowledged twice.
    DoubledAck(u32),
    /// The n-th copy that ends is never acknowledged.
    LostAck(u32),
    /// The n-th result is told twice.
    DoubledResult(u32),
    /// The n-th result is never told.
    LostResult(u32),
    /// The n-th event with tokens does not reach its caller.
    LostEvent(u32),
    /// The n-th event with tokens reaches its caller twice.
    DoubledEvent(u32),
    /// The n-th event with tokens says another one.
    ChangedToken(u32),
    /// The n-th abort does not reach the core.
    LostAbort(u32),
    /// The n-th request is looked up under the salt of another tenant.
    ForeignSalt(u32),
    /// The n-th final event does not reach its caller.
    LostFinal(u32),
}

impl Planted {
    /// Which occasion of its kind the fault takes; 0 is none.
    pub(crate) fn occasion(self) -> u32 {
        match self {
            Planted::Nothing => 0,
            Planted::LostWrite(n)
            | Planted::WrongCount(n)
            | Planted::SwappedPages(n)
            | Planted::ForeignPage(n)
            | Planted::LostCopy(n)
            | Planted::BelievedCopy(n)
            | Planted::EarlyCopy(n)
            | Planted::LostPin(n)
            | Planted::DoubledAck(n)
            | Planted::LostAck(n)
            | Planted::DoubledResult(n)
            | Planted::LostResult(n)
            | Planted::LostEvent(n)
            | Planted::DoubledEvent(n)
            | Planted::ChangedToken(n)
            | Planted::LostAbort(n)
            | Planted::ForeignSalt(n)
            | Planted::LostFinal(n) => n,
        }
    }
}
