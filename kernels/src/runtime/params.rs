//! Parameter structs that cross to a kernel as raw bytes.

/// A `#[repr(C)]` mirror of a kernel's parameter struct; made by [`kernel_params!`](crate::kernel_params).
pub trait KernelParams: Copy {
    /// Size in bytes, and the FNV-1a hash of one `name:offset:size;` for each field, in declaration
    /// order: the text that `PARAMS_LAYOUT` hashes in `kernels/cuda/include/params.h`.
    fn layout() -> (u64, u64);

    /// The struct's bytes, padding included as zeros.
    fn bytes(&self) -> Vec<u8>;
}

/// FNV-1a, 64 bits, over `text`, from `state`.
pub fn fnv1a(state: u64, text: &[u8]) -> u64 {
    text.iter().fold(state, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// FNV-1a's initial state.
pub const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// A device address in a parameter struct: `const T*` or `T*` in the kernel. Zero is `nullptr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct DeviceAddress(pub u64);

/// One scalar of a parameter struct, written in the machine's byte order.
pub trait ParamField: Copy {
    /// Writes the field's bytes at the start of `target`.
    fn write(self, target: &mut [u8]);
}

macro_rules! param_field {
    ($($scalar:ty),*) => {$(
        impl ParamField for $scalar {
            fn write(self, target: &mut [u8]) {
                target[..size_of::<$scalar>()].copy_from_slice(&self.to_ne_bytes());
            }
        }
    )*};
}
param_field!(i32, u32, i64, u64, f32);

impl ParamField for DeviceAddress {
    fn write(self, target: &mut [u8]) {
        self.0.write(target);
    }
}

/// Declares the Rust mirror of a kernel's parameter struct, fields in the kernel's order.
#[macro_export]
macro_rules! kernel_params {
    ($(#[$doc:meta])* $vis:vis struct $name:ident { $($(#[$field_doc:meta])* $field:ident : $ty:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        $vis struct $name { $($(#[$field_doc])* pub $field: $ty),* }

        impl $crate::runtime::params::KernelParams for $name {
            fn layout() -> (u64, u64) {
                let mut hash = $crate::runtime::params::FNV_OFFSET;
                $(
                    let text = format!("{}:{}:{};", stringify!($field), std::mem::offset_of!($name, $field), size_of::<$ty>());
                    hash = $crate::runtime::params::fnv1a(hash, text.as_bytes());
                )*
                (size_of::<$name>() as u64, hash)
            }

            fn bytes(&self) -> Vec<u8> {
                let mut bytes = vec![0; size_of::<$name>()];
                $($crate::runtime::params::ParamField::write(self.$field, &mut bytes[std::mem::offset_of!($name, $field)..]);)*
                bytes
            }
        }
    };
}
