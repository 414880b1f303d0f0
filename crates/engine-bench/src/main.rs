//! `engine-host-static`: the host with the kinds linked in instead of loaded as plugins.
//!
//! Only for `bench`: beside the host it tells what the plugin boundary costs, and having one
//! allocator for everything it counts the allocations of host and kinds together.

mod counting;

use std::process::ExitCode;

use engine_host::bench::Linked;
use resource_api::{KindHandle, kind};

use counting::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn kinds() -> Vec<KindHandle> {
    vec![
        kind::<resource_attn::PagedAttention>(),
        kind::<resource_kv::Kv>(),
        kind::<resource_positions::Positions>(),
        kind::<resource_sampler::Sampler>(),
    ]
}

fn main() -> ExitCode {
    engine_host::cli::main_with(Some(Linked { kinds, allocations: counting::count }))
}
