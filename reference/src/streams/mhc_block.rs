//! A block of a layer as seen by its residual streams (inference 0 and 2, training 11.1). It has
//! two sites. Each site mixes the streams, passes the mix to a sublayer through a norm, and mixes
//! the output back. The sublayers are stand-ins that add rows to their input, so that only the
//! streams and the norms remain:
//!
//! ```text
//! pre, post, comb = mhc_mix(X)      h  = mhc_pre(X, pre)       u  = rms_norm(h)       y  = u + attn_add
//! X'              = mhc_post(X, y, post, comb)
//! pre', post', comb' = mhc_mix(X')  h' = mhc_pre(X', pre')     u' = rms_norm(h')      y' = u' + ffn_add
//! out             = mhc_post(X', y', post', comb')
//!
//! dX' total = (mhc_post's of dout) + (mhc_pre's of dh') + (mhc_mix's of dpre', dpost', dcomb')
//! dX total  = (mhc_post's of dX' total) + (mhc_pre's of dh) + (mhc_mix's of dpre, dpost, dcomb)
//! ```
//!
//! # Rounding points
//!
//! Those of the operators; between them X', h, u, y and their gradients are stored in bf16,
//! coefficients in f32.

use candle_core::Tensor;

use crate::error::Result;
use crate::named::Named;
use crate::precision::Rounding;
use crate::streams::mhc_mix::{self, Numbers};
use crate::{
    projections::rms_norm, streams::mhc_post, streams::mhc_post_mix_pre, streams::mhc_pre,
};

/// The names of a site's parameters and of the rows that its sublayer adds.
struct Site {
    projection: &'static str,
    scale: &'static str,
    base: &'static str,
    weight: &'static str,
    add: &'static str,
}

const ATTN: Site = Site {
    projection: "attn_fn",
    scale: "attn_scale",
    base: "attn_base",
    weight: "attn_weight",
    add: "attn_add",
};
const FFN: Site = Site {
    projection: "ffn_fn",
    scale: "ffn_scale",
    base: "ffn_base",
    weight: "ffn_weight",
    add: "ffn_add",
};

impl Site {
    /// `named` with the parameters of the projection, under the names of `mhc_mix`.
    fn with_projection(&self, inputs: &Named, named: Named) -> Result<Named> {
        let named = named.with("fn", inputs.tensor(self.projection)?.clone());
        Ok(named
            .with("scale", inputs.tensor(self.scale)?.clone())
            .with("base", inputs.tensor(self.base)?.clone()))
    }
}

/// The inputs and outputs of a sublayer.
struct Sublayer {
    /// h, stored.
    h: Tensor,
    /// u and y before the store.
    u: Tensor,
    y: Tensor,
    rstd: Tensor,
}

impl Sublayer {
    fn of(
        h: &Tensor,
        site: &Site,
        inputs: &Named,
        eps: f64,
        rounding: &mut Rounding,
    ) -> Result<Self> {
        let h = rounding.bf16(h)?;
        let norm =
            Named::new().with("x", h.clone()).with("weight", inputs.tensor(site.weight)?.clone());
        let norm = rms_norm::forward(&norm, eps, rounding)?;
        let (u, rstd) = (norm.tensor("y")?.clone(), norm.tensor("rstd")?.clone());
        let y = (rounding.bf16(&u)? + inputs.tensor(site.add)?)?;
        Ok(Self { h, u, y: rounding.f32(&y)?, rstd })
    }

    /// The gradients of h and of the norm's weight, from the gradient of y, as stored.
    fn backward(
        &self,
        dy: &Tensor,
        weight: &Tensor,
        eps: f64,
        rounding: &mut Rounding,
    ) -> Result<(Tensor, Tensor)> {
        let norm = Named::new()
            .with("x", self.h.clone())
            .with("weight", weight.clone())
            .with("dy", dy.clone());
        let gradients = rms_norm::backward(&norm, eps, rounding)?;
        Ok((gradients.tensor("dx")?.clone(), gradients.tensor("dweight")?.clone()))
    }
}

/// All values between the input streams and the output streams.
struct Run {
    /// Outputs of `mhc_mix` of the first site, and of `mhc_post_mix_pre`.
    attn: Named,
    fused: Named,
    /// X', stored.
    between: Tensor,
    attn_h: Tensor,
    attn_sublayer: Sublayer,
    ffn_sublayer: Sublayer,
    /// y and y', stored.
    attn_y: Tensor,
    ffn_y: Tensor,
}

fn run(inputs: &Named, numbers: Numbers, rounding: &mut Rounding) -> Result<Run> {
    let streams = Named::new().with("streams", inputs.tensor("streams")?.clone());
    let attn =
        mhc_mix::forward(&ATTN.with_projection(inputs, streams.clone())?, numbers, rounding)?;
    let mixed =
        mhc_pre::forward(&streams.with("pre", attn.tensor("pre")?.clone()), None, rounding)?;
    let attn_h = mixed.tensor("h")?.clone();
    let attn_sublayer = Sublayer::of(&attn_h, &ATTN, inputs, numbers.norm_eps, rounding)?;
    let attn_y = rounding.bf16(&attn_sublayer.y)?;
    let fused =
        mhc_post_mix_pre::forward(&fused_inputs(inputs, &attn, &attn_y)?, numbers, rounding)?;
    let ffn_sublayer = Sublayer::of(fused.tensor("h")?, &FFN, inputs, numbers.norm_eps, rounding)?;
    let ffn_y = rounding.bf16(&ffn_sublayer.y)?;
    let between = rounding.bf16(fused.tensor("out")?)?;
    Ok(Run { attn, fused, between, attn_h, attn_sublayer, ffn_sublayer, attn_y, ffn_y })
}

/// The inputs of `mhc_post_mix_pre`.
fn fused_inputs(inputs: &Named, attn: &Named, attn_y: &Tensor) -> Result<Named> {
    let named =
        Named::new().with("streams", inputs.tensor("streams")?.clone()).with("y", attn_y.clone());
    let named =
        named.with("post", attn.tensor("post")?.clone()).with("comb", attn.tensor("comb")?.clone());
    FFN.with_projection(inputs, named)
}

impl Run {
    /// The inputs of the last `mhc_post`.
    fn last(&self) -> Result<Named> {
        let named =
            Named::new().with("streams", self.between.clone()).with("y", self.ffn_y.clone());
        let named = named.with("post", self.fused.tensor("next_post")?.clone());
        Ok(named.with("comb", self.fused.tensor("next_comb")?.clone()))
    }
}

/// `out` and `between` `[num_tokens, 4, hidden_size]`, stored in bf16. For each site, with the
/// prefix `attn_` or `ffn_`: `h`, `u` and `y` `[num_tokens, hidden_size]`, stored in bf16, `pre`,
/// `post`, `comb`, `mix` and `rstd` as in `mhc_mix`, and `norm_rstd` `[num_tokens]`, stored in f32.
/// The inputs are:
///
/// - `streams` `[num_tokens, 4, hidden_size]`, stored in bf16;
/// - for each site, with the prefix `attn_` or `ffn_`: `fn` `[24, 4, hidden_size]`, `scale` `[3]`,
///   `base` `[24]` and `weight` `[hidden_size]`, stored in f32, and `add`
///   `[num_tokens, hidden_size]`, stored in bf16.
pub fn forward(inputs: &Named, numbers: Numbers, rounding: &mut Rounding) -> Result<Named> {
    let run = run(inputs, numbers, rounding)?;
    let out = mhc_post::forward(&run.last()?, rounding)?.tensor("out")?.clone();
    let outputs = Named::new().with("out", out).with("between", run.fused.tensor("out")?.clone());
    let named = |outputs: Named, of: &Named, names: &[(&'static str, &'static str)]| {
        names.iter().try_fold(outputs, |all, (name, own)| {
            Ok::<_, crate::Error>(all.with(name, of.tensor(own)?.clone()))
        })
    };
    let outputs = named(
        outputs,
        &run.attn,
        &[
            ("attn_pre", "pre"),
            ("attn_post", "post"),
            ("attn_comb", "comb"),
            ("attn_mix", "mix"),
            ("attn_rstd", "rstd"),
        ],
    )?;
    let outputs = named(
        outputs,
        &run.fused,
        &[
            ("ffn_pre", "next_pre"),
            ("ffn_post", "next_post"),
            ("ffn_comb", "next_comb"),
            ("ffn_mix", "mix"),
            ("ffn_rstd", "rstd"),
            ("ffn_h", "h"),
        ],
    )?;
    let (attn, ffn) = (run.attn_sublayer, run.ffn_sublayer);
    let outputs = outputs.with("attn_h", run.attn_h).with("attn_u", attn.u).with("attn_y", attn.y);
    let outputs = outputs.with("attn_norm_rstd", attn.rstd).with("ffn_norm_rstd", ffn.rstd);
    Ok(outputs.with("ffn_u", ffn.u).with("ffn_y", ffn.y))
}

/// `dstreams`, `dattn_add` and `dffn_add`, stored in bf16, and for each site `dfn`, `dscale`,
/// `dbase` and `dweight`, stored in f32. Also the gradients between the operators: `dbetween` and
/// for each site `dh`, stored in bf16, `dpost` and `dcomb`, stored in f32. Names have `attn_` or
/// `ffn_` after the `d`. The inputs are those of [`forward`] and `dout`.
pub fn backward(inputs: &Named, numbers: Numbers, rounding: &mut Rounding) -> Result<Named> {
    let run = run(inputs, numbers, rounding)?;
    let last =
        mhc_post::backward(&run.last()?.with("dout", inputs.tensor("dout")?.clone()), rounding)?;
    let dffn_add = last.tensor("dy")?.clone();
    let dy = rounding.bf16(&dffn_add)?;
    let (dffn_h, dffn_weight) =
        run.ffn_sublayer.backward(&dy, inputs.tensor(FFN.weight)?, numbers.norm_eps, rounding)?;

    let fused = fused_inputs(inputs, &run.attn, &run.attn_y)?;
    let fused = fused
        .with("dout", rounding.bf16(last.tensor("dstreams")?)?)
        .with("dh", rounding.bf16(&dffn_h)?);
    let fused = fused.with("dnext_post", last.tensor("dpost")?.clone());
    let fused = fused.with("dnext_comb", last.tensor("dcomb")?.clone());
    let fused = mhc_post_mix_pre::backward(&fused, numbers, rounding)?;
    let dattn_add = fused.tensor("dy")?.clone();
    let dy = rounding.bf16(&dattn_add)?;
    let (dattn_h, dattn_weight) =
        run.attn_sublayer.backward(&dy, inputs.tensor(ATTN.weight)?, numbers.norm_eps, rounding)?;

    let site = Named::new().with("streams", inputs.tensor("streams")?.clone());
    let site = ATTN.with_projection(inputs, site)?.with("pre", run.attn.tensor("pre")?.clone());
    let site = site
        .with("dout", rounding.bf16(fused.tensor("dstreams")?)?)
        .with("dh", rounding.bf16(&dattn_h)?);
    let site = site
        .with("dpost", fused.tensor("dpost")?.clone())
        .with("dcomb", fused.tensor("dcomb")?.clone());
    let site = mhc_post_mix_pre::site_backward(&site, numbers, rounding)?;

    let of = |gradients: &Named, name| Ok::<_, crate::Error>(gradients.tensor(name)?.clone());
    let named = Named::new()
        .with("dstreams", of(&site, "dstreams")?)
        .with("dbetween", of(&fused, "dout_total")?);
    let named = named
        .with("dattn_add", dattn_add)
        .with("dattn_h", dattn_h)
        .with("dattn_weight", dattn_weight);
    let named =
        named.with("dffn_add", dffn_add).with("dffn_h", dffn_h).with("dffn_weight", dffn_weight);
    let named = named.with("dattn_fn", of(&site, "dfn")?).with("dattn_scale", of(&site, "dscale")?);
    let named = named.with("dattn_base", of(&site, "dbase")?).with("dffn_fn", of(&fused, "dfn")?);
    let named =
        named.with("dffn_scale", of(&fused, "dscale")?).with("dffn_base", of(&fused, "dbase")?);
    let named =
        named.with("dattn_post", of(&fused, "dpost")?).with("dattn_comb", of(&fused, "dcomb")?);
    Ok(named.with("dffn_post", of(&last, "dpost")?).with("dffn_comb", of(&last, "dcomb")?))
}
