//! Places of blocks in a grid, and of threads in a block.

/// CUDA's `dim3`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Dim3 {
    /// Size along x, the fastest axis.
    pub x: u32,
    /// Size along y.
    pub y: u32,
    /// Size along z.
    pub z: u32,
}

impl Dim3 {
    /// From an array `[x, y, z]`.
    pub fn new([x, y, z]: [u32; 3]) -> Self {
        Self { x, y, z }
    }

    /// The index with number `linear` within this size, x fastest.
    pub fn unflatten(self, linear: u64) -> Self {
        let (x, y) = (u64::from(self.x), u64::from(self.y));
        Self { x: (linear % x) as u32, y: (linear / x % y) as u32, z: (linear / (x * y)) as u32 }
    }

    /// The number of an index within this size.
    pub fn flatten(self, index: Self) -> u64 {
        let (x, y) = (u64::from(self.x), u64::from(self.y));
        u64::from(index.x) + x * (u64::from(index.y) + y * u64::from(index.z))
    }

    /// Number of indices.
    pub fn count(self) -> u64 {
        u64::from(self.x) * u64::from(self.y) * u64::from(self.z)
    }
}

impl std::fmt::Display for Dim3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({}, {}, {})", self.x, self.y, self.z)
    }
}
