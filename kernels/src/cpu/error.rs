//! What a kernel call refuses, with the numbers.

/// A call that was refused before it computed anything, or a task that panicked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The name is none of `auto`, `avx512`, `avx2`, `scalar`.
    #[error("unknown instruction set {name:?}; use auto, avx512, avx2 or scalar")]
    UnknownIsa {
        /// The name given.
        name: Box<str>,
    },
    /// This CPU cannot run the instruction set asked for.
    #[error("this CPU has no {wanted}; use auto or {best}")]
    IsaUnavailable {
        /// The instruction set asked for.
        wanted: &'static str,
        /// The best one this CPU has.
        best: &'static str,
    },
    /// A GGML tensor type that no kernel reads.
    #[error("GGML type {id} is not supported")]
    UnsupportedType {
        /// The type's number in a GGUF file.
        id: u32,
    },
    /// A row that does not consist of whole blocks.
    #[error("rows of {cols} elements are not whole blocks of {block_len} ({ggml_type})")]
    RowNotBlocks {
        /// The type's name.
        ggml_type: &'static str,
        /// Elements of a row.
        cols: usize,
        /// Elements of a block.
        block_len: usize,
    },
    /// A matrix without elements.
    #[error("a matrix of {rows} x {cols} has no elements")]
    EmptyMatrix {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
    },
    /// Matrix bytes that do not fit its shape.
    #[error("{ggml_type} matrix of {rows} x {cols} takes {wanted} bytes, found {found}")]
    MatrixBytes {
        /// The type's name.
        ggml_type: &'static str,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Bytes the shape takes.
        wanted: usize,
        /// Bytes given.
        found: usize,
    },
    /// A buffer of another length than the shapes say.
    #[error("{buffer} holds {found} elements, {wanted} wanted")]
    BufferLength {
        /// Which argument.
        buffer: &'static str,
        /// Elements the shapes ask for.
        wanted: usize,
        /// Elements given.
        found: usize,
    },
    /// A row index outside a matrix.
    #[error("row {row} of a matrix of {rows} rows")]
    RowOutOfRange {
        /// Row asked for.
        row: usize,
        /// Rows of the matrix.
        rows: usize,
    },
    /// Query heads that are no multiple of the KV heads.
    #[error("{heads} query heads are no multiple of {kv_heads} KV heads")]
    HeadsNotDivisible {
        /// Query heads.
        heads: u32,
        /// KV heads.
        kv_heads: u32,
    },
    /// A head dimension no kernel computes.
    #[error("head dimension {head_dim}: a multiple of {multiple}, at most {max}, is wanted")]
    HeadDim {
        /// Elements of a head.
        head_dim: u32,
        /// What it must be a multiple of.
        multiple: u32,
        /// The largest.
        max: u32,
    },
    /// A page size the kernels of a device do not compute.
    #[error("pages of {page_tokens} tokens: a power of two, at least {least}, is wanted")]
    PageTokens {
        /// Tokens of a page.
        page_tokens: u32,
        /// The smallest.
        least: u32,
    },
    /// A layout in another order than the kernels read.
    #[error("the kernels read page-first KV layouts only")]
    LayoutOrder,
    /// A layer outside the layout.
    #[error("layer {layer} of a KV layout of {layers} layers")]
    LayerOutOfRange {
        /// Layer asked for.
        layer: u32,
        /// Layers of the layout.
        layers: u32,
    },
    /// A page table that does not cover the positions of its row.
    #[error(
        "row {row} ends at position {positions} and needs {wanted_pages} pages of {page_tokens} \
         tokens, its table has {found_pages}"
    )]
    PageTableShort {
        /// Index of the row in the call.
        row: usize,
        /// Positions the row covers, from 0.
        positions: u64,
        /// Tokens of a page.
        page_tokens: u32,
        /// Pages these positions take.
        wanted_pages: u64,
        /// Pages of the table.
        found_pages: usize,
    },
    /// A page outside the arena.
    #[error("page {page} of an arena of {pages} pages")]
    PageOutOfRange {
        /// Page in a table.
        page: u32,
        /// Pages of the arena.
        pages: u64,
    },
    /// An arena that is not a whole number of pages, or not aligned for its elements.
    #[error(
        "arena of {bytes} bytes at address remainder {misalignment}: \
         whole pages of {page_bytes} bytes wanted"
    )]
    ArenaBytes {
        /// Bytes of the arena.
        bytes: usize,
        /// Bytes of a page.
        page_bytes: u64,
        /// Address modulo the element size.
        misalignment: usize,
    },
    /// Sizes whose product does not fit the address space.
    #[error("{what} of {a} x {b} overflows the address space")]
    TooLarge {
        /// What the sizes describe.
        what: &'static str,
        /// One factor.
        a: usize,
        /// The other factor.
        b: usize,
    },
    /// No token has a finite logit, or all are masked.
    #[error("no token of {vocab} can be drawn: every logit is masked or not a number")]
    NothingToSample {
        /// Logits given.
        vocab: usize,
    },
    /// A sampling parameter outside its range.
    #[error("{parameter} is {value}; {wanted} is wanted")]
    SampleParameter {
        /// Its name.
        parameter: &'static str,
        /// Its value.
        value: f32,
        /// The allowed range, in words.
        wanted: &'static str,
    },
    /// A task of the pool panicked; the others of its run were finished or skipped.
    #[error("task {task} panicked: {message}")]
    TaskPanicked {
        /// Index of the task.
        task: usize,
        /// The panic's message.
        message: Box<str>,
    },
}

/// Refuses a buffer whose length is not `wanted`.
pub(crate) fn check_len(
    buffer: &'static str,
    found: usize,
    wanted: usize,
) -> Result<(), KernelError> {
    if found == wanted {
        Ok(())
    } else {
        Err(KernelError::BufferLength {
            buffer,
            wanted,
            found,
        })
    }
}

/// `a * b`, or an error that names the shape.
pub(crate) fn checked_area(what: &'static str, a: usize, b: usize) -> Result<usize, KernelError> {
    a.checked_mul(b).ok_or(KernelError::TooLarge { what, a, b })
}
