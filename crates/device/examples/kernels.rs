//! Compiles the kernels that the engine uses, as `cargo xtask kernels` asks for: prints what each takes
//! of a multiprocessor, fails on spilled registers (`--check`), writes what a release brings
//! (`--embed DIR`); for every released architecture, or for one (`--arch sm_90a`).

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use device::cuda::{
    Arch, Instance, KernelCache, compile_and_report, compiler_version, named_instances,
};

fn main() -> ExitCode {
    let (mut embed, mut archs) = (None, Arch::RELEASED.to_vec());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match (arg.as_str(), &mut args) {
            ("--check", _) => {}
            ("--embed", args) => embed = args.next().map(PathBuf::from),
            ("--arch", args) => {
                let name = args.next().unwrap_or_default();
                archs.retain(|arch| arch.to_string() == name);
                if archs.is_empty() {
                    let all = Arch::RELEASED.map(|arch| arch.to_string()).join(", ");
                    eprintln!("error: --arch {name} is none of {all}");
                    return ExitCode::from(2);
                }
            }
            (other, _) => {
                eprintln!("error: unknown option {other}");
                return ExitCode::from(2);
            }
        }
    }
    match run(embed, &archs) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(spilling) => {
            eprintln!("error: {spilling} kernels spill more registers than they are meant to");
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Answers how many kernels spill.
fn run(embed: Option<PathBuf>, archs: &[Arch]) -> device::Result<usize> {
    let started = Instant::now();
    let instances = named_instances();
    println!("NVRTC {}, {} instances", compiler_version()?, instances.len());
    println!(
        "{:<64} {:>8} {:>5} {:>6} {:>6} {:>7}",
        "kernel", "arch", "regs", "stack", "spills", "shared"
    );
    let cache = KernelCache::in_folders(embed.clone(), None);
    let (mut spilling, mut bytes) = (0, 0);
    for instance in &instances {
        for &arch in archs {
            let cubin = compile(instance, arch, &mut spilling)?;
            bytes += cubin.len();
            if embed.is_some() {
                cache.ship(instance, arch, &cubin)?;
            }
        }
    }
    println!("{bytes} bytes of machine code in {:.1} s", started.elapsed().as_secs_f64());
    Ok(spilling)
}

/// Kernels that may spill, and how many bytes: what they lose by it was measured, or is too little to
/// measure.
const MAY_SPILL: [(&str, Arch, u32); 5] = [
    ("attention_prefill HEAD_DIM=128 KV_TYPE=KV_I8", Arch::SM_80, 44),
    ("attention_prefill HEAD_DIM=128 KV_TYPE=KV_I8", Arch::SM_90A, 40),
    ("attention_prefill", Arch::SM_90A, 12),
    ("attention_prefill", Arch::SM_100A, 48),
    ("decode_step_4", Arch::SM_90A, 96),
];

fn compile(instance: &Instance, arch: Arch, spilling: &mut usize) -> device::Result<Vec<u8>> {
    let (cubin, kernels) = compile_and_report(instance, arch)?;
    for kernel in kernels {
        let name = match instance.to_string().split_once(' ') {
            Some((_, defines)) => format!("{} {defines}", kernel.name),
            None => kernel.name.clone(),
        };
        println!(
            "{name:<64} {arch:>8} {:>5} {:>6} {:>6} {:>7}",
            kernel.registers, kernel.stack, kernel.spills, kernel.shared
        );
        let allowed = MAY_SPILL.iter().find(|(k, a, _)| name.starts_with(k) && *a == arch);
        *spilling += usize::from(kernel.spills > allowed.map_or(0, |(.., bytes)| *bytes));
    }
    Ok(cubin)
}
