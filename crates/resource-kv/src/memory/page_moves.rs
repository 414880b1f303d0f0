//! Pages of a device on their way from and to host memory, on a stream of their own.

use std::sync::{Arc, Mutex, PoisonError};

use device::cuda::{Context, Event, KvPool, PinnedBuffer, Stream};
use resource_api::Result;

/// Copies of whole pages beside the steps. They overlap with steps that come later, and the host says
/// which steps they come after.
#[derive(Debug)]
pub(super) struct PageMoves {
    context: Arc<Context>,
    stream: Stream,
    /// Where the steps' stream was when it was last followed.
    mark: Mutex<Event>,
    /// For memory that the device does not copy from and to by itself; made at its first use.
    staging: Mutex<Option<PinnedBuffer<u8>>>,
}

impl PageMoves {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self {
            context: context.clone(),
            stream: Stream::new(context)?,
            mark: Mutex::new(Event::new(context)?),
            staging: Mutex::default(),
        })
    }

    /// Has what follows wait for what `steps` has been given.
    pub(super) fn follow(&self, steps: &Stream) -> Result<()> {
        let mark = self.mark.lock().unwrap_or_else(PoisonError::into_inner);
        mark.record(steps)?;
        Ok(self.stream.wait(&mark)?)
    }

    /// Begins to copy a page; it is there once [`PageMoves::wait`] has returned.
    pub(super) fn download(
        &self,
        pool: &KvPool,
        page: u32,
        to: &mut PinnedBuffer<u8>,
    ) -> Result<()> {
        Ok(pool.download_page(&self.stream, page, to)?)
    }

    /// The reverse of [`PageMoves::download`].
    pub(super) fn upload(
        &self,
        pool: &KvPool,
        from: &mut PinnedBuffer<u8>,
        page: u32,
    ) -> Result<()> {
        Ok(pool.upload_page(&self.stream, from, page)?)
    }

    pub(super) fn wait(&self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }

    /// Hands out the bytes of a page.
    pub(super) fn read(
        &self,
        pool: &KvPool,
        page: u32,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        self.staged(pool, |staging| {
            self.download(pool, page, staging)?;
            take(staging.as_slice()?)
        })
    }

    /// Stores the bytes of a page, and waits for that.
    pub(super) fn write(&self, pool: &KvPool, page: u32, bytes: &[u8]) -> Result<()> {
        self.staged(pool, |staging| {
            staging.as_mut_slice()?.copy_from_slice(bytes);
            self.upload(pool, staging, page)?;
            self.wait()
        })
    }

    fn staged(
        &self,
        pool: &KvPool,
        with: impl FnOnce(&mut PinnedBuffer<u8>) -> Result<()>,
    ) -> Result<()> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *staging {
            Some(staging) => with(staging),
            empty => with(empty.insert(PinnedBuffer::zeroed(&self.context, pool.page_bytes())?)),
        }
    }
}
