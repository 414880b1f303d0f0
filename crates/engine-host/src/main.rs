//! The `engine-host` program.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    engine_host::cli::main()
}
