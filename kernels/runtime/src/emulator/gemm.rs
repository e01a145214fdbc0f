//! The emulator's library for GEMMs: on the host, on memory that the host accesses.

use half::bf16;

use crate::backend::Backend;
use crate::error::Result;
use crate::matrix::{Matrix, MatrixProduct};
use crate::tensor::{DType, HostTensor};

/// The values of a matrix, row by row.
fn download(matrix: &Matrix, backend: &dyn Backend, dtype: DType) -> Result<Vec<f64>> {
    let [rows, columns] = matrix.extents;
    let mut values = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        let mut bytes = vec![0; columns * dtype.size()];
        backend.download(matrix.row_address(row, dtype), &mut bytes)?;
        values.extend(HostTensor { dtype, shape: vec![columns], bytes }.to_f64());
    }
    Ok(values)
}

/// GEMMs on the host, on memory that the host accesses through `backend`.
pub(super) fn multiply(backend: &dyn Backend, product: &MatrixProduct) -> Result<()> {
    let MatrixProduct { a, b, before, out, dtype, .. } = *product;
    (0..product.count).try_for_each(|number| {
        let (a, b) = (a.number(number, DType::Bf16), b.number(number, DType::Bf16));
        let before = before.map(|before| before.number(number, dtype));
        multiply_one(
            backend,
            &MatrixProduct { a, b, before, out: out.number(number, dtype), ..*product },
        )
    })
}

/// Sums in f64, rounded to fp32, with the addend added in fp32.
fn multiply_one(backend: &dyn Backend, product: &MatrixProduct) -> Result<()> {
    let MatrixProduct { a, b, transposed, before, out, dtype, .. } = *product;
    let ([rows, columns], depth) = (out.extents, product.depth());
    let (numbers_a, numbers_b) =
        (download(&a, backend, DType::Bf16)?, download(&b, backend, DType::Bf16)?);
    let before = before.map(|before| download(&before, backend, dtype)).transpose()?;
    let place = |matrix: Matrix, transposed: bool, row: usize, column: usize| {
        if transposed { column * matrix.extents[1] + row } else { row * matrix.extents[1] + column }
    };
    let term = |row: usize, column: usize, k: usize| {
        numbers_a[place(a, transposed[0], row, k)] * numbers_b[place(b, transposed[1], k, column)]
    };
    let element = |row: usize, column: usize| {
        let sum = (0..depth).map(|k| term(row, column, k)).sum::<f64>() as f32;
        before.as_ref().map_or(sum, |before| before[row * columns + column] as f32 + sum)
    };
    for row in 0..rows {
        let written = (0..columns).map(|column| element(row, column));
        let bytes: Vec<u8> = match dtype {
            DType::F32 => written.flat_map(f32::to_ne_bytes).collect(),
            _ => written.flat_map(|sum| bf16::from_f32(sum).to_ne_bytes()).collect(),
        };
        backend.upload(out.row_address(row, dtype), &bytes)?;
    }
    Ok(())
}
