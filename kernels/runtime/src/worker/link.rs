//! The messages between a device and its worker process, over a socket: a request or an answer as
//! JSON, followed by its bytes.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The longest message without its bytes: a longer one is not a message of ours.
const LONGEST: usize = 1 << 24;

/// One end of the connection.
pub struct Link {
    reader: BufReader<UnixStream>,
    writer: BufWriter<UnixStream>,
    /// Tag of the last request that was read or written; its answer has the same tag.
    tag: u64,
}

impl Link {
    /// An end of `stream`. `tag` is that of the first request, an unpredictable number; each
    /// request has the next one. A kernel that writes to the files of its process does not know it.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn new(stream: UnixStream, tag: u64) -> io::Result<Self> {
        let reader = BufReader::with_capacity(1 << 16, stream.try_clone()?);
        Ok(Self {
            reader,
            writer: BufWriter::with_capacity(1 << 16, stream),
            tag: tag.wrapping_sub(1),
        })
    }

    /// The time limit for an answer.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn set_time_limit(&self, limit: Duration) -> io::Result<()> {
        self.reader.get_ref().set_read_timeout(Some(limit))
    }

    /// Sends a request that has no answer.
    ///
    /// # Errors
    /// A connection that the other side has closed.
    pub fn tell(&mut self, request: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
        self.tag = self.tag.wrapping_add(1);
        write(&mut self.writer, self.tag, request, bytes)
    }

    /// Sends a request, and waits for the answer and its bytes.
    ///
    /// # Errors
    /// As [`Link::tell`]; an answer that is late or invalid.
    pub fn ask<A: DeserializeOwned>(
        &mut self,
        request: &impl Serialize,
        bytes: &[u8],
    ) -> io::Result<(A, Vec<u8>)> {
        self.tell(request, bytes)?;
        self.writer.flush()?;
        read(&mut self.reader, self.tag)
    }

    /// The next request and its bytes.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] if the device has closed its end; an invalid request.
    pub fn receive<Q: DeserializeOwned>(&mut self) -> io::Result<(Q, Vec<u8>)> {
        self.tag = self.tag.wrapping_add(1);
        read(&mut self.reader, self.tag)
    }

    /// Answers the last request.
    ///
    /// # Errors
    /// A connection that the other side has closed.
    pub fn answer(&mut self, answer: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
        write(&mut self.writer, self.tag, answer, bytes)?;
        self.writer.flush()
    }
}

fn write(
    stream: &mut impl Write,
    tag: u64,
    message: &impl Serialize,
    bytes: &[u8],
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    for number in [tag, text.len() as u64, bytes.len() as u64] {
        stream.write_all(&number.to_le_bytes())?;
    }
    stream.write_all(&text)?;
    stream.write_all(bytes)
}

/// Reads the message with this tag.
fn read<M: DeserializeOwned>(stream: &mut impl Read, tag: u64) -> io::Result<(M, Vec<u8>)> {
    let mut number = || {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
    };
    let (found, text, count) = (number()?, number()?, number()?);
    let length = usize::try_from(text).ok().filter(|&length| length <= LONGEST && found == tag);
    let length = length
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no message of a worker"))?;
    let mut text = vec![0; length];
    stream.read_exact(&mut text)?;
    let message = serde_json::from_slice(&text)?;
    // No memory is reserved for bytes that have not arrived.
    let mut bytes = Vec::new();
    match stream.take(count).read_to_end(&mut bytes)? as u64 {
        read if read == count => Ok((message, bytes)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::RuntimeError;
    use crate::worker::failure::Failure;

    #[test]
    fn a_message_comes_back_with_its_bytes_and_half_of_one_or_another_is_an_error() {
        let mut sent = Vec::new();
        write(&mut sent, 7, &("a request", u64::MAX), b"bytes").unwrap();
        let mut stream = &sent[..];
        let (message, bytes) = read::<(String, u64)>(&mut stream, 7).unwrap();
        assert_eq!(
            (message, &bytes[..], stream),
            (("a request".to_owned(), u64::MAX), &b"bytes"[..], &b""[..])
        );
        for length in 0..sent.len() {
            assert!(read::<(String, u64)>(&mut &sent[..length], 7).is_err(), "{length} bytes");
        }
        let kind =
            |sent: &[u8], tag| read::<(String, u64)>(&mut &sent[..], tag).unwrap_err().kind();
        assert_eq!(kind(&sent, 8), io::ErrorKind::InvalidData, "another message was expected");
        sent[15] = 1;
        assert_eq!(kind(&sent, 7), io::ErrorKind::InvalidData, "of such a length there is none");
    }

    #[test]
    fn whatever_a_worker_or_its_device_sends_is_a_message_or_an_error() {
        use proptest::prelude::*;
        use proptest::sample::Index;
        let everything = std::env::var("PARITY_TESTS").is_ok_and(|extent| extent == "all");
        let cases = if everything { 11_000 } else { 300 };
        let config =
            ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
        let fault = RuntimeError::Fault {
            kernel: "k".into(),
            block: "b".into(),
            thread: "t".into(),
            what: "w".into(),
        };
        let mut sent = Vec::new();
        write(&mut sent, 7, &Failure::from(fault), b"parameters").unwrap();
        let changes = prop::collection::vec((any::<Index>(), any::<u8>(), 0..4u8), 0..4);
        proptest!(config, |(changes in changes, end in any::<Index>(), whole in any::<bool>())| {
            let mut bytes = sent.clone();
            for (at, byte, kind) in changes {
                // Usually in the text; a wrong tag is detected at once.
                let first = if kind == 0 { 0 } else { 24 };
                let at = first + at.index(bytes.len() - first);
                if kind == 1 { bytes.insert(at, byte) } else { bytes[at] = byte }
            }
            if !whole {
                bytes.truncate(end.index(bytes.len()));
            }
            if let Ok((failure, _)) = read::<Failure>(&mut &bytes[..], 7) {
                let _ = RuntimeError::from(failure).to_string();
            }
        });
    }

    #[test]
    fn answers_belong_to_the_request_that_came_last_and_those_without_one_count() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut device, mut worker) =
            (Link::new(ours, u64::MAX).unwrap(), Link::new(theirs, u64::MAX).unwrap());
        let works = std::thread::spawn(move || {
            let (first, _) = worker.receive::<u8>().unwrap();
            let (second, bytes) = worker.receive::<u8>().unwrap();
            worker.answer(&(first + second), &bytes).unwrap();
            worker.receive::<u8>().unwrap_err().kind()
        });
        device.tell(&1u8, b"").unwrap();
        assert_eq!(device.ask::<u8>(&2u8, b"carried").unwrap(), (3, b"carried".to_vec()));
        drop(device);
        assert_eq!(works.join().unwrap(), io::ErrorKind::UnexpectedEof);
    }
}
