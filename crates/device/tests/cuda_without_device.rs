//! What must hold on a machine without a GPU: clear errors, and kernels that compile.

use device::cuda::{self, Arch, Context, Instance, KernelCache, Library};

/// Compiling takes NVRTC; `ENGINE_HOST_CUDA_LIBS` may name the folder it lies in.
fn has_compiler() -> bool {
    match Library::Nvrtc.open() {
        Ok(()) => true,
        Err(e) => {
            eprintln!("not checked: {e}");
            false
        }
    }
}

#[test]
fn a_machine_without_a_driver_says_so_in_one_line() {
    let Err(error) = Library::Driver.open() else { return };
    let error = error.to_string();
    assert!(error.contains("libcuda.so.1") && error.contains("device = \"cpu\""), "{error}");
    assert!(!error.contains('\n'), "{error}");
    assert_eq!(Context::of(0).unwrap_err().to_string(), error);
    assert_eq!(cuda::devices().unwrap_err().to_string(), error);
}

#[test]
fn machine_code_for_every_released_architecture_is_an_elf_file() {
    if !has_compiler() {
        return;
    }
    for arch in Arch::RELEASED {
        let (cubin, uses) = cuda::compile_and_report(&Instance::of("fill.cu"), arch).unwrap();
        assert_eq!(cubin[..4], *b"\x7fELF", "{arch}");
        let [only] = uses.as_slice() else { panic!("{uses:?}") };
        assert_eq!((only.name.as_str(), only.spills), ("fill_random", 0));
        assert!((4..=64).contains(&only.registers), "{only:?}");
    }
}

#[test]
fn a_second_process_finds_what_the_first_compiled() {
    if !has_compiler() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = KernelCache::in_folders(None, Some(folder.path().to_owned()));
    let instance = Instance::of("fill.cu");
    let compiled = cache.cubin(&instance, Arch::SM_80).unwrap();
    let files: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().path()).collect();
    let [file] = files.as_slice() else { panic!("{files:?}") };

    // The last byte lies in the machine code: a file that was changed is compiled again, and replaced.
    let whole = std::fs::read(file).unwrap();
    std::fs::write(file, &whole[..whole.len() - 1]).unwrap();
    assert_eq!(cache.cubin(&instance, Arch::SM_80).unwrap(), compiled);
    assert_eq!(std::fs::read(file).unwrap(), whole);
}

#[test]
fn what_does_not_compile_is_told_with_the_compilers_words() {
    if !has_compiler() {
        return;
    }
    let wrong = Instance::of("fill.cu").define("u64", "nonsense$");
    let error = cuda::compile(&wrong, Arch::SM_80).unwrap_err().to_string();
    assert!(
        error.starts_with("kernels/fill.cu u64=nonsense$ does not compile for sm_80: "),
        "{error}"
    );
    assert!(error.contains("error"), "{error}");
}
