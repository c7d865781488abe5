//! One pass of all tokens of a step through all layers, queued on the stream.

use rootstock_kernels::cuda::{
    AttentionCall, CudaError, Device, DeviceBuffer, NormCall, Numerics, ProductCall,
    ProductLibrary, StoreCall, Stream,
};

use super::CudaBackend;
use super::slot::{Slot, grow};
use super::weights::{Layer, Linear};

/// Activations, shared by the steps in flight: their kernels run one after another.
#[derive(Debug)]
pub(super) struct Work {
    /// Hidden state `[n][dim]`.
    x: DeviceBuffer<f32>,
    /// Normed hidden state `[n][dim]`.
    h: DeviceBuffer<f32>,
    q: DeviceBuffer<f32>,
    k: DeviceBuffer<f32>,
    v: DeviceBuffer<f32>,
    att: DeviceBuffer<f32>,
    gate: DeviceBuffer<f32>,
    up: DeviceBuffer<f32>,
    /// Partial results of split attention.
    partial: DeviceBuffer<f32>,
}

impl Work {
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        let empty = || DeviceBuffer::new(device, 0, "activations");
        Ok(Self {
            x: empty()?,
            h: empty()?,
            q: empty()?,
            k: empty()?,
            v: empty()?,
            att: empty()?,
            gate: empty()?,
            up: empty()?,
            partial: empty()?,
        })
    }
}

impl Work {
    /// Where the buffers are: a graph holds for these places only.
    pub(super) fn places(&self) -> impl Iterator<Item = u64> {
        let buffers = [
            &self.x,
            &self.h,
            &self.q,
            &self.k,
            &self.v,
            &self.att,
            &self.gate,
            &self.up,
            &self.partial,
        ];
        buffers.into_iter().map(DeviceBuffer::place)
    }
}

impl CudaBackend {
    /// Makes room for the activations and logits of a step.
    pub(super) fn make_room(&mut self, slot: &mut Slot) -> Result<(), CudaError> {
        let config = self.model.config();
        let (n, picks) = (slot.batch.tokens() as usize, slot.batch.picks() as usize);
        let (dim, ffn) = (config.dim as usize, config.ffn as usize);
        let w = &mut self.work;
        grow(&mut slot.logits, picks * config.vocab as usize, "logits")?;
        grow(&mut w.h, picks * dim, "activations")?;
        for (buffer, width) in [
            (&mut w.x, dim),
            (&mut w.h, dim),
            (&mut w.q, config.q_width()),
            (&mut w.k, config.kv_width()),
            (&mut w.v, config.kv_width()),
            (&mut w.att, config.q_width()),
            (&mut w.gate, ffn),
            (&mut w.up, ffn),
        ] {
            grow(buffer, n * width, "activations")?;
        }
        Ok(())
    }

    /// Takes the tokens of a step through all layers; K and V go into the pages.
    pub(super) fn layers(&mut self, stream: &Stream, slot: &Slot) -> Result<(), CudaError> {
        if slot.batch.tokens() == 0 {
            return Ok(());
        }
        let embedding = &self.model.embedding;
        self.general
            .embed(stream, &slot.batch, embedding, &mut self.work.x)?;
        for index in 0..self.model.config().layers {
            self.attend(stream, slot, index)?;
            self.feed_forward(stream, slot, index)?;
        }
        Ok(())
    }

    /// The attention half of a layer.
    fn attend(&mut self, stream: &Stream, slot: &Slot, index: u32) -> Result<(), CudaError> {
        let Some(layer) = self.model.layers.get(index as usize) else {
            return Ok(());
        };
        let config = self.model.config();
        let (general, batch) = (&self.general, &slot.batch);
        let w = &mut self.work;
        let norm = NormCall {
            weight: &layer.attn_norm,
            eps: config.eps,
            picks: false,
        };
        general.rms_norm(stream, batch, &norm, &w.x, &mut w.h)?;
        let library = self.library.as_ref();
        let call = |linear, x| product(linear, x, slot, self.numerics, library, false);
        general.product(stream, &call(&layer.q, &w.h), &mut w.q)?;
        general.product(stream, &call(&layer.k, &w.h), &mut w.k)?;
        general.product(stream, &call(&layer.v, &w.h), &mut w.v)?;
        let mut store = StoreCall {
            pages: &mut self.pages,
            layer: index,
            batch,
            heads: config.heads,
            q: &mut w.q,
            k: &w.k,
            v: &w.v,
            q_norm: layer.q_norm.as_ref(),
            k_norm: layer.k_norm.as_ref(),
            eps: config.eps,
            angles: &self.model.angles,
            halves: self.model.halves,
        };
        self.attention.store(stream, &mut store)?;
        for &copy in &slot.standing {
            self.copies.wait_for_layer(stream, copy, index)?;
        }
        let mut call = AttentionCall {
            pages: &self.pages,
            layer: index,
            batch,
            heads: config.heads,
            scale: scale(config.head_dim),
            q: &w.q,
            out: &mut w.att,
            partial: &mut w.partial,
        };
        self.attention.attend(stream, &mut call)?;
        let out = product(&layer.attn_out, &w.att, slot, self.numerics, library, true);
        general.product(stream, &out, &mut w.x)
    }

    /// The feed-forward half of a layer.
    fn feed_forward(&mut self, stream: &Stream, slot: &Slot, index: u32) -> Result<(), CudaError> {
        let Some(Layer {
            ffn_norm,
            gate,
            up,
            down,
            ..
        }) = self.model.layers.get(index as usize)
        else {
            return Ok(());
        };
        let config = self.model.config();
        let (general, numerics) = (&self.general, self.numerics);
        let library = self.library.as_ref();
        let w = &mut self.work;
        let norm = NormCall {
            weight: ffn_norm,
            eps: config.eps,
            picks: false,
        };
        general.rms_norm(stream, &slot.batch, &norm, &w.x, &mut w.h)?;
        let to_gate = product(gate, &w.h, slot, numerics, library, false);
        general.product(stream, &to_gate, &mut w.gate)?;
        let to_up = product(up, &w.h, slot, numerics, library, false);
        general.product(stream, &to_up, &mut w.up)?;
        let count = slot.batch.tokens() as usize * config.ffn as usize;
        general.silu_mul(stream, &mut w.gate, &w.up, count)?;
        let back = product(down, &w.gate, slot, numerics, library, true);
        general.product(stream, &back, &mut w.x)
    }

    /// Logits of the step's picks into the slot.
    pub(super) fn pick_logits(
        &mut self,
        stream: &Stream,
        slot: &mut Slot,
    ) -> Result<(), CudaError> {
        let config = self.model.config();
        let picks = slot.batch.picks();
        let w = &mut self.work;
        let norm = NormCall {
            weight: &self.model.output_norm,
            eps: config.eps,
            picks: true,
        };
        self.general
            .rms_norm(stream, &slot.batch, &norm, &w.x, &mut w.h)?;
        let call = ProductCall {
            matrix: self.model.head(),
            x: &w.h,
            n: picks,
            bias: None,
            add: false,
            numerics: self.numerics,
            library: self.library.as_ref(),
        };
        self.general.product(stream, &call, &mut slot.logits)
    }
}

fn product<'a>(
    linear: &'a Linear,
    x: &'a DeviceBuffer<f32>,
    slot: &Slot,
    numerics: Numerics,
    library: Option<&'a ProductLibrary>,
    add: bool,
) -> ProductCall<'a> {
    ProductCall {
        matrix: &linear.weight,
        x,
        n: slot.batch.tokens(),
        bias: linear.bias.as_ref(),
        add,
        numerics,
        library,
    }
}

#[expect(clippy::cast_precision_loss, reason = "head widths are at most 256")]
fn scale(head_dim: u32) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}
